from __future__ import annotations

import math
import multiprocessing
import random
import tracemalloc
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.checkpoint.rng import rng_state
from hpctrain.errors import ConfigError, TaskError
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.train.evaluation import check_evaluation
from hpctrain.train.modes import names_in_evaluation_mode
from hpctrain.train.task_state import remember_attributes
from hpctrain.train.training import build
from tests.unit.train.small_task import Small


@pytest.fixture
def check(compose_small, lone_world, agreement, monkeypatch):
    """Checks a task whose methods are replaced by these functions."""

    def run(*words, **methods):
        for name, method in methods.items():
            monkeypatch.setattr(Small, name, method)
        training = build(compose_small(*words), lone_world)
        assert check_evaluation(training, agreement) is None
        return training

    return run


@pytest.fixture
def agreement(lone_world):
    return Agreement(lone_world, StopRequest())


def returning(*names):
    return lambda task, model, batch: dict.fromkeys(names, (1.0, 1))


def test_loading_processes_end_with_it(check):
    check("data.num_workers=2")
    assert multiprocessing.active_children() == []


def test_what_the_tasks_evaluation_raises_has_a_note_that_it_came_before_the_first_step(check):
    def evaluate(task, model, batch):
        raise LookupError("no features were collected yet")

    with pytest.raises(LookupError) as caught:
        check(evaluate=evaluate)
    assert caught.value.__notes__ == ["(this evaluation ran before the first step: trainer.sanity_batches=2)"]


def test_two_batches_are_evaluated_unless_configured_otherwise(check):
    assert check().task.calls == {"loss": 0, "evaluate": 2}
    assert check("trainer.sanity_batches=1").task.calls["evaluate"] == 1
    assert check("trainer.sanity_batches=0").task.calls["evaluate"] == 0
    assert check("+task.eval_samples=0").task.calls["evaluate"] == 0


def test_it_leaves_no_trace(compose_small, lone_world, agreement, monkeypatch):
    def evaluate(task, model, batch):
        model.train()
        model(batch[0])
        task.state["seen"] += 1
        random.random()
        np.random.random()
        torch.rand(1)
        return {"loss": (1.0, 1)}

    monkeypatch.setattr(Small, "evaluate", evaluate)
    monkeypatch.setattr(
        Small, "build_model", lambda task: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    )
    monkeypatch.setattr(Small, "state", {"seen": 0}, raising=False)
    monkeypatch.setattr(Small, "state_dict", lambda task: task.state, raising=False)
    monkeypatch.setattr(Small, "load_state_dict", lambda task, state: task.state.update(state), raising=False)
    training = build(compose_small("trainer.ema_decay=0.5"), lone_world)
    training.module[1].eval()
    with torch.no_grad():
        training.module[2].weight.add_(1.0)  # the averages are evaluated, and not these
    before, state = rng_state(), {name: value.clone() for name, value in training.module.state_dict().items()}
    check_evaluation(training, agreement)
    assert repr(rng_state()) == repr(before)
    assert all(torch.equal(value, state[name]) for name, value in training.module.state_dict().items())
    assert names_in_evaluation_mode(training.module) == ["1"]
    assert training.task.state == {"seen": 0}
    assert all(parameter.grad is None for parameter in training.module.parameters())


@pytest.mark.parametrize("other", ["histogram", "scalar", "returned"])
def test_a_name_of_two_kinds_is_refused(check, other):
    def evaluate(task, model, batch):
        task.log.table("mu", ["value"], [[1.0]])
        if other == "histogram" and task.log.will_record:
            task.log.histogram("mu", torch.zeros(3))
        if other == "scalar":
            task.log.scalar("mu", 1.0)
        return {"loss": (1.0, 1), **({"mu": (1.0, 1)} if other == "returned" else {})}

    kind = "histogram" if other == "histogram" else "value"
    with pytest.raises(TaskError, match=rf"Small logs 'eval/mu' as table and as {kind}"):
        check(evaluate=evaluate)


def test_what_hpctrain_logs_in_a_step_may_be_a_name_of_the_evaluation(check):
    def evaluate(task, model, batch):
        task.log.scalar("lr", 1.0)
        return {"loss": (1.0, 1)}

    check(evaluate=evaluate)


def test_a_metric_that_is_never_returned_is_refused(check, monkeypatch):
    with pytest.raises(ConfigError, match=r"checkpoint\.metric=f1: the evaluation returns loss; name one of these"):
        check("checkpoint.metric=f1", "checkpoint.metric_mode=max")
    monkeypatch.setattr(Small, "metric", "f1")
    expected = r"Small\.metric is 'f1', but Small\.evaluate and Small\.derive return loss, recall: set metric"
    with pytest.raises(TaskError, match=expected):
        check(evaluate=returning("recall", "loss"))
    check(derive=lambda task, means: {"f1": means["loss"]})


@pytest.mark.parametrize("returned", ["recall_neg", "recall", "recall_1"])
def test_a_metric_that_later_batches_may_return_is_not_refused(check, agreement, monkeypatch, caplog, returned):
    def evaluate(task, model, batch):
        task.calls["evaluate"] += 1
        names = [returned, metric] if task.calls["evaluate"] > 2 else [returned]
        return dict.fromkeys(names, (1.0, 1))

    metric = "recall_0" if returned == "recall_1" else "recall_pos"
    words = ["+task.eval_samples=9", f"checkpoint.metric={metric}", "checkpoint.metric_mode=max"]
    training = check(*words, evaluate=evaluate)
    expected = f"checkpoint.metric is {metric}, but the first batches of the evaluation return {returned}; nothing is"
    assert expected in caplog.text
    assert f"eval/{metric}" in training.evaluation(agreement).means
    monkeypatch.setattr(Small, "metric", metric)
    check("+task.eval_samples=9")
    assert f"Small.metric is {metric}, but the first" in caplog.text


@pytest.mark.parametrize("typo", ["acuracy", "Accuracy", "acc", "val_accuracy", "accuracy1"])
def test_a_typo_in_a_metric_is_refused_whatever_later_batches_return(check, typo):
    with pytest.raises(ConfigError, match="returns accuracy, loss; name one of these, or return it from every"):
        check(
            "+task.eval_samples=9",
            f"checkpoint.metric={typo}",
            "checkpoint.metric_mode=max",
            evaluate=returning("loss", "accuracy"),
        )


def test_the_name_under_which_a_metric_is_logged_is_its_name(check):
    check("checkpoint.metric=eval/loss", "checkpoint.keep_best=1")
    check("callbacks=[early_stopping]", "callbacks.early_stopping.metric=eval/loss")


def test_a_plateau_without_its_metric_is_refused_before_the_first_step(check):
    expected = r"^schedule\.kind=plateau: needs the metric loss, but the evaluation returns accuracy; set"
    with pytest.raises(ConfigError, match=expected):
        check("schedule=plateau", evaluate=returning("accuracy"))


def test_a_task_that_names_no_metric_needs_no_loss_unless_the_best_are_kept(check):
    check(evaluate=returning("accuracy"))
    with pytest.raises(TaskError, match=r"Small\.metric is 'loss', but .* return accuracy"):
        check("checkpoint.keep_best=1")
    check("checkpoint.keep_best=1", "checkpoint.metric=accuracy", "checkpoint.metric_mode=max")


def test_a_metric_of_early_stopping_that_is_never_returned_is_refused(check):
    stopping = ("callbacks=[early_stopping]", "callbacks.early_stopping.mode=max")
    with pytest.raises(ConfigError, match=r"callbacks\.early_stopping\.metric=f1: the evaluation returns loss; name"):
        check(*stopping, "callbacks.early_stopping.metric=f1")
    check(*stopping, "callbacks.early_stopping.metric=accuracy", evaluate=returning("accuracy"))
    with pytest.raises(TaskError, match=r"Small\.metric is 'loss', but .* return accuracy"):
        check(*stopping)
    check(*stopping, "checkpoint.metric=accuracy", "checkpoint.metric_mode=max")


def test_a_derived_metric_that_an_untrained_model_cannot_have_is_no_mistake(check, monkeypatch):
    monkeypatch.setattr(Small, "metric", "perplexity")
    check(
        evaluate=lambda task, model, batch: {"loss": (1e6, 1)},
        derive=lambda task, means: {"perplexity": math.exp(means["loss"])},
    )
    with pytest.raises(KeyError, match="los"):
        check(derive=lambda task, means: {"perplexity": means["los"]})


@pytest.mark.parametrize("error", [AssertionError, IndexError, RuntimeError])
def test_a_derived_metric_that_needs_all_samples_is_computed_later(check, agreement, monkeypatch, caplog, error):
    def evaluate(task, model, batch):
        task.seen += len(batch[1])
        task.outputs["labels"].append(batch[1])
        return {"loss": (1.0, 1)}

    def derive(task, means):
        labels = torch.cat(task.outputs["labels"])
        seen, task.seen = task.seen, 0
        if seen != len(labels) or len(labels) != 6:
            raise error("not all of them")
        task.outputs["labels"].clear()
        return {"f1": 0.5}

    def train_dataset(task):
        task.seen, task.outputs = 0, {"labels": []}
        return make_data(task)

    monkeypatch.setattr(Small, "metric", "f1")
    make_data = Small.train_dataset
    monkeypatch.setattr(Small, "train_dataset", train_dataset)
    caplog.set_level("WARNING", "hpctrain.train")
    training = check("trainer.sanity_batches=1", evaluate=evaluate, derive=derive)
    assert "Small.derive failed in the evaluation before the first step (trainer.sanity_b" in caplog.messages[0]
    assert "not all of them" in caplog.text
    assert training.evaluation(agreement).means["eval/f1"] == 0.5
    # all were evaluated: then it's a mistake
    with pytest.raises(error, match="not all of them"):
        check("+task.eval_samples=5")


def test_numbers_and_containers_of_a_task_are_restored_in_place_and_other_objects_are_not():
    task = Small()
    made, inner, kept = object(), [1], {"a": [1]}
    task.number, task.lists, task.table, task.made, task.flag = 1.5, deque([inner]), kept, None, False
    task.names = {"a"}
    task.circle = [task.lists]
    task.circle.append(task.circle)
    task.data, task.rows = [0] * 1001, [[0] * 1001]
    undo = remember_attributes(task)
    task.number, task.made, task.flag = 3, made, True
    inner.append(2)
    task.lists.append(3)
    task.table["a"].append(2)
    task.table["b"] = 1
    task.names.add("b")
    task.data.append(1)
    task.rows[0].append(1)
    task.rows.append([])
    undo()
    assert (task.number, task.lists, task.table, task.names) == (1.5, deque([[1]]), {"a": [1]}, {"a"})
    assert task.table is kept
    assert task.lists[0] is inner
    assert (task.made, task.flag) == (made, True)
    # large ones hold data, and are not looked through
    assert (len(task.data), len(task.rows), len(task.rows[0])) == (1002, 1, 1002)


def test_a_tasks_data_is_neither_copied_nor_looked_through():
    task = Small()
    task.samples = [[number] * 50 for number in range(20_000)]
    tracemalloc.start()
    undo = remember_attributes(task)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    undo()
    assert taken < 100_000


def test_a_mistake_shows_before_the_first_step_of_a_new_run_and_not_of_a_resumed_one(attempt, directory, monkeypatch):
    assert not attempt("+task.signal_in=loss", "+task.signal_at=3").run()
    monkeypatch.setattr(Small, "evaluate", lambda task, model, batch: None)
    resumed = attempt()
    with pytest.raises(TaskError, match="it returned None"):
        resumed.run()
    assert resumed.step == 4
    directory.path.rename(directory.path.with_name("stopped"))
    directory.create(0o750)
    fresh = attempt()
    with pytest.raises(TaskError, match="it returned None"):
        fresh.run()
    assert fresh.step == 0


def test_a_stop_ends_it_after_the_batch_in_which_it_was_requested(attempt, directory):
    stopped = attempt("+task.signal_in=evaluate", "+task.signal_at=1")
    assert not stopped.run()
    assert (stopped.training.task.calls["evaluate"], stopped.step) == (1, 0)
    assert not directory.metrics.exists()
    assert list_checkpoints(directory) == []


def test_its_time_counts_as_evaluation_and_its_batches_as_progress(attempt, monkeypatch):
    def evaluate(task, model, batch):
        seen.append((trainer.context.times.doing, trainer.running.progress))
        return {"loss": (1.0, 1)}

    seen = []
    monkeypatch.setattr(Small, "evaluate", evaluate)
    trainer = attempt()
    trainer.run()
    assert seen[:2] == [("eval_s", (0, 0)), ("eval_s", (0, 1))]


def test_a_resume_with_a_changed_configuration_is_checked_and_keeps_the_change_once_it_trains(attempt, directory):
    assert not attempt("+task.signal_in=loss", "+task.signal_at=3").run()
    metrics = directory.metrics.read_bytes()
    directory.config_before.write_text("before")
    changed = attempt("checkpoint.metric=los", "checkpoint.metric_mode=min")
    with pytest.raises(ConfigError, match=r"checkpoint\.metric=los: the evaluation returns loss"):
        changed.run()
    assert changed.step == 2
    assert directory.config_before.exists()
    assert directory.metrics.read_bytes() == metrics
    assert attempt("checkpoint.metric=loss").run()
    assert not directory.config_before.exists()
    directory.config_before.write_text("before")
    assert attempt("checkpoint.metric=loss").run()  # no step is left to train
    assert directory.config_before.exists()
