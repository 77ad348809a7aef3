from __future__ import annotations

import io
import logging
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from hpctrain.data.order import BucketOrder, WeightedOrder
from hpctrain.errors import TaskError
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import StopRequest
from hpctrain.train.training import build
from tests.unit.train.small_task import Small


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 10),
        (["trainer.max_steps=null", "trainer.max_epochs=3"], 12),
        (["trainer.max_steps=7", "trainer.max_epochs=3"], 7),
        (["trainer.max_steps=70", "trainer.max_epochs=3"], 12),
    ],
)
def test_a_run_ends_with_its_steps_or_its_epochs_whichever_come_first(compose_small, lone_world, words, expected):
    assert build(compose_small(*words), lone_world).total_steps == expected


def test_the_loader_continues_from_a_step(compose_small, lone_world):
    training = build(compose_small(), lone_world)
    straight = [batch.indices.tolist() for batch in islice(iter(training.data.loader(0)), 12)]
    assert [batch.indices.tolist() for batch in islice(iter(training.data.loader(4)), 4)] == straight[8:]


class OneFile(IterableDataset):
    """Samples of a file that all passes read."""

    def __init__(self):
        self.file = io.StringIO("\n".join(map(str, range(60))))

    def __iter__(self):
        self.file.seek(0)
        return ({"number": torch.tensor(float(line))} for line in self.file)


def test_the_first_micro_batch_is_read_again_without_a_change_of_the_runs_own_pass(
    compose_small, lone_world, monkeypatch
):
    monkeypatch.setattr(Small, "train_dataset", lambda task: OneFile())
    training = build(compose_small(), lone_world)
    with training.data.first_micro_batch(training.task_state) as first:
        assert first.batch.pop("number").tolist() == [0, 1, 2]
    own = iter(training.data.loader(0))
    assert [batch.batch["number"].tolist() for batch in islice(own, 2)] == [[0, 1, 2], [3, 4, 5]]
    with training.data.first_micro_batch(training.task_state) as again:
        assert again.batch["number"].tolist() == [0, 1, 2]
    assert next(own).batch["number"].tolist() == [6, 7, 8]


def test_what_prepare_draws_changes_nothing(compose_small, lone_world, monkeypatch):
    # a rank that has nothing to prepare draws nothing: neither do the others of a node, nor a resume
    expected = build(compose_small(), lone_world).module.state_dict()
    monkeypatch.setattr("tests.unit.train.small_task.Small.prepare", lambda task: torch.rand(3))
    found = build(compose_small(), lone_world).module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_data_without_a_length_is_refused(compose_small, lone_world, monkeypatch):
    monkeypatch.setattr("tests.unit.train.small_task.Small.train_dataset", lambda task: object())
    with pytest.raises(TaskError, match="object can't be used as a dataset: expected __len__"):
        build(compose_small(), lone_world)


@pytest.mark.parametrize("order", [BucketOrder([1, 2, 3], 0, batch_size=2), WeightedOrder([1, 2, 3], 0)])
def test_an_order_of_other_samples_is_refused(compose_small, lone_world, monkeypatch, order):
    monkeypatch.setattr(Small, "order", lambda task, num_samples, seed: order)
    with pytest.raises(TaskError, match=r"order\(\) returned a \w+Order for 3 samples, but the data have \d+"):
        build(compose_small(), lone_world).data.loader(0)


def test_a_new_run_starts_from_given_weights_and_a_resumed_one_does_not(compose_small, lone_world, tmp_path):
    first = build(compose_small("seed=1"), lone_world).module.state_dict()
    torch.save(first, tmp_path / "weights.pt")
    words = ("seed=2", f"init_from={tmp_path / 'weights.pt'}")
    fresh = build(compose_small(*words), lone_world).module.state_dict()
    resumed = build(compose_small(*words), lone_world, resumes=True).module.state_dict()
    assert all(torch.equal(fresh[name], value) for name, value in first.items())
    assert not torch.equal(resumed["0.weight"], first["0.weight"])


@pytest.mark.parametrize("precision", ["fp32", "fp16_master"])
def test_a_model_that_is_built_in_evaluation_mode_is_trained_and_a_part_of_it_is_not(
    compose_small, lone_world, caplog, precision
):
    with caplog.at_level(logging.INFO, "hpctrain.train"):
        training = build(compose_small("+task.in_evaluation_mode=true", f"precision={precision}"), lone_world)
    assert all(module.training for module in training.model.modules())
    assert "the model was built in evaluation mode: calling train() on it and all its modules" in caplog.messages
    training = build(compose_small("+task.frozen=true", f"precision={precision}"), lone_world)
    assert [module.training for module in training.model] == [True, False, True]


@pytest.mark.parametrize("precision", ["fp32", "fp16_master"])
def test_a_task_changes_modes_in_its_loss_by_the_modules_that_it_built(
    compose_small, lone_world, monkeypatch, precision
):
    build_model, compute = Small.build_model, Small.loss

    def keep(task):
        task.net = build_model(task)
        return task.net

    def loss(task, model, batch):
        task.net[1].train(task.calls["loss"] % 4 < 2)  # two micro-batches per step
        return compute(task, model, batch)

    def evaluate(task, model, batch):
        task.net.eval()
        return {"loss": (1.0, 1)}

    monkeypatch.setattr(Small, "build_model", keep)
    monkeypatch.setattr(Small, "loss", loss)
    monkeypatch.setattr(Small, "evaluate", evaluate)
    training = build(compose_small(f"precision={precision}"), lone_world)
    modes, micro_batches = [], iter(training.data.loader(0))
    for step in range(4):
        training.step(step, micro_batches)
        # what an evaluation changes isn't kept, in any precision
        training.evaluation(Agreement(lone_world, StopRequest()))
        modes.append([module.training for module in training.model])
    assert modes == [[True, True, True], [True, False, True]] * 2


def test_a_task_with_half_of_a_state_is_refused_before_its_data_is_read(compose_small, lone_world, monkeypatch):
    monkeypatch.setattr("tests.unit.train.small_task.Small.state_dict", dict, raising=False)
    monkeypatch.setattr("tests.unit.train.small_task.Small.train_dataset", lambda task: pytest.fail("the data is read"))
    with pytest.raises(TaskError, match="Small has state_dict, but no load_state_dict"):
        build(compose_small(), lone_world)


def test_unfreezing_is_logged_when_it_happens(compose_small, lone_world, caplog):
    training = build(compose_small('optimizer.groups=[{match: "0.*", unfreeze_at_step: 1}]'), lone_world)
    training.step.prepare(0)
    batches = iter(training.data.loader(0))
    with caplog.at_level(logging.INFO, "hpctrain.train"):
        training.step(0, batches)
        assert not caplog.messages
        training.step(1, batches)
    assert caplog.messages == ["after step 1: unfroze 40 parameters in 2 tensors: 0.weight, 0.bias"]


def test_parameters_that_the_loss_does_not_reach_are_named(compose_small, lone_world, monkeypatch, caplog):
    def build_with_another(task):
        model = build_model(task)
        model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
        return model

    build_model = Small.build_model
    monkeypatch.setattr(Small, "build_model", build_with_another)
    training = build(compose_small(), lone_world)
    training.step.prepare(0)
    training.step(0, iter(training.data.loader(0)))
    (message,) = caplog.messages
    assert message.startswith("Small.loss gave no gradient to unused, which it trains: ")


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["trainer.global_batch_size=23", "trainer.micro_batch_size=23"], 2),
        (["trainer.global_batch_size=23", "trainer.micro_batch_size=23", "data.drop_last=true"], None),
        (["trainer.global_batch_size=23", "trainer.micro_batch_size=23", "trainer.max_steps=1"], None),
        (["trainer.global_batch_size=22", "trainer.micro_batch_size=22"], None),
    ],
)
def test_the_single_sample_that_batch_norm_will_refuse_is_named_before_the_first_step(
    compose_small, lone_world, monkeypatch, caplog, words, step
):
    build_model = Small.build_model
    monkeypatch.setattr(Small, "build_model", lambda task: build_model(task).append(nn.BatchNorm1d(3)))
    build(compose_small(*words), lone_world)
    found = [message for message in caplog.messages if "BatchNorm1d" in message]
    expected = f"the last step of each epoch (step {step}) gives the model a single sample, of which BatchNorm1d can't"
    assert [message.startswith(expected) for message in found] == [True] * (step is not None)
