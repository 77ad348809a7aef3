from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hpctrain.config.precision import FORMATS
from hpctrain.errors import CheckpointDamagedError, CheckpointError
from hpctrain.rank.determinism import set_determinism
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.train.precision import set_fp32_precision
from hpctrain.train.process_state import process_state_restored
from hpctrain.train.stored_model import load_model, load_task


@pytest.fixture
def trained(attempt, compose_small, directory):
    """Trains a run to its end; returns its training, and a function that loads its model."""

    def train(*words):
        trainer = attempt(*words)
        assert trainer.run()
        config = compose_small(*words)

        def load(which="newest", averaged=None):
            return load_model(config, directory, which, device="cpu", averaged=averaged)

        return trainer.training, load

    return train


def equal(weights, others):
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_model_has_the_weights_of_the_end_and_is_in_evaluation_mode(trained):
    training, load = trained()
    model = load()
    assert equal(model.state_dict(), training.module.state_dict())
    assert not any(module.training for module in model.modules())
    assert not equal(load(8).state_dict(), model.state_dict())


def test_the_best_is_the_checkpoint_with_the_best_score(trained, directory):
    _, load = trained("checkpoint.metric_mode=max", "checkpoint.keep=9", "checkpoint.every_steps=4")
    scores = {info.step: info.score.value for info in list_checkpoints(directory) if info.score is not None}
    best = max(scores, key=scores.get)
    assert best < max(scores)
    assert equal(load("best").state_dict(), load(best).state_dict())


def test_a_best_that_was_not_kept_is_named_with_the_one_that_is_loaded(trained, directory, caplog):
    words = ("checkpoint.metric_mode=max", "checkpoint.keep_best=0", "checkpoint.every_steps=null")
    _, load = trained(*words)
    assert equal(load("best").state_dict(), load(10).state_dict())
    (message,) = caplog.messages[-1:]
    assert f"{directory.path}: the best evaluation is loss " in message
    assert " at step 4, whose checkpoint isn't on disk" in message
    assert "the best checkpoint on disk is that of step 10, with loss " in message


def test_without_a_score_there_is_no_best(trained):
    _, load = trained("+task.eval_samples=0")
    with pytest.raises(CheckpointError, match=r"no checkpoint has a score; checkpoint\.keep_best=1"):
        load("best")


def test_a_step_is_a_number(trained):
    _, load = trained()
    with pytest.raises(CheckpointError, match=r"a saved step \(.*8.*\), got '8'"):
        load("8")


def test_a_moving_average_is_loaded_where_the_run_evaluates_it(trained):
    training, load = trained("trainer.ema_decay=0.5")
    average = training.ema.averages
    assert equal(dict(load().named_parameters()), average)
    assert equal(dict(load(averaged=True).named_parameters()), average)
    assert equal(load(averaged=False).state_dict(), training.module.state_dict())


def test_without_a_moving_average_none_is_loaded(trained):
    _, load = trained()
    with pytest.raises(CheckpointError, match="holds no moving average of this model's weights"):
        load(averaged=True)


def test_a_model_in_half_precision_takes_and_returns_what_the_task_computes_with(trained):
    training, load = trained("precision=bf16_pure")
    model = load()
    assert {weights.dtype for weights in model.parameters()} == {torch.bfloat16}
    assert equal(model.state_dict(), training.module.state_dict())
    assert model(torch.zeros(2, 4)).dtype == torch.float32


def test_a_model_that_several_optimizers_trained_has_its_weights_and_their_average(trained):
    named = {name: f"{{_target_: torch.optim.SGD, lr: 0.1, match: '{name}.*'}}" for name in ("0", "2")}
    words = ["optimizer=named", *(f"+optimizer.named.layer{name}={value}" for name, value in named.items())]
    training, load = trained(*words, "trainer.ema_decay=0.5")
    assert equal(load(averaged=False).state_dict(), training.module.state_dict())
    assert equal(dict(load().named_parameters()), training.ema.averages)


def test_weights_that_checkpoints_leave_out_are_those_that_the_task_builds(trained, directory):
    training, load = trained("task._target_=tests.unit.train.small_task.Adapted", "trainer.ema_decay=0.5")
    assert set(torch.load(directory.checkpoint(10) / "model.pt", weights_only=True)) == {"2.weight", "2.bias"}
    assert equal(dict(load(averaged=False).named_parameters()), dict(training.module.named_parameters()))
    assert equal(dict(load()[2].named_parameters(prefix="2")), training.ema.averages)


def test_a_step_that_was_not_saved_is_named_with_those_that_were(trained):
    _, load = trained()
    with pytest.raises(CheckpointError, match=r"expected newest, best or a saved step \(8, 10\), got 7"):
        load(7)


def test_a_damaged_checkpoint_is_refused_and_the_newest_intact_one_is_taken(trained, directory):
    _, load = trained()
    file = directory.checkpoint(10) / "model.pt"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="is not intact"):
        load(10)
    assert equal(load().state_dict(), load(8).state_dict())


def test_a_run_without_a_checkpoint_has_no_model(compose_small, directory):
    with pytest.raises(CheckpointError, match="has saved none yet"):
        load_model(compose_small(), directory, "newest", device="cpu", averaged=None)


def test_random_states_and_settings_of_the_process_stay(compose_small):
    def state():
        settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        cudnn = torch.backends.cudnn
        backends = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
        fills = torch.utils.deterministic.fill_uninitialized_memory
        drawn = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        return settings, backends, fills, torch.get_float32_matmul_precision(), drawn

    before = state()
    assert type(load_task(compose_small())).__name__ == "Small"
    with process_state_restored():
        torch.set_num_threads(3)
        set_determinism(True, environ={})
        torch.backends.cudnn.benchmark = True
        set_fp32_precision(FORMATS["fp32"])
        torch.rand(1), np.random.rand(), random.random()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert not torch.backends.cudnn.allow_tf32
        assert state() != before
    assert state() == before


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_are_computed_although_the_program_turned_that_off(off):
    weight = torch.ones(1, requires_grad=True)
    with off():
        with process_state_restored():
            (2 * weight).sum().backward()
        assert not torch.is_grad_enabled()
    assert weight.grad == 2
