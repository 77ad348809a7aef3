from __future__ import annotations

import math

import pytest
import torch

from hpctrain.errors import DivergedError
from hpctrain.train.divergence import Divergence, _is_finite
from hpctrain.train.training import build


class Written:
    """Stands where no checkpoint is in flight."""

    def finish(self):
        pass


@pytest.fixture
def training(compose_small, lone_world):
    return build(compose_small("precision.min_loss_scale=0.5"), lone_world)


@pytest.fixture
def divergence(training, directory):
    return Divergence(training, directory, Written(), 3)


def test_a_loss_that_is_nan_ends_the_run_and_the_last_good_checkpoint_is_named(attempt, directory):
    trainer = attempt("+task.nan_from=15", "logger.every_steps=4")
    with pytest.raises(
        DivergedError, match="turned NaN between steps 6 and 8; the last good checkpoint is of step 5"
    ) as raised:
        trainer.run()
    assert f"init_from={directory.checkpoint(5)}" in str(raised.value)


def test_no_checkpoint_is_written_of_a_loss_that_is_nan(attempt, directory):
    with pytest.raises(DivergedError, match="turned NaN between steps 1 and 5; there is no good checkpoint"):
        attempt("+task.nan_from=9", "logger.every_steps=100", "trainer.eval_every_steps=100").run()
    assert directory.checkpoint_steps() == []


def test_a_finite_loss_moves_the_steps_that_are_named(divergence):
    divergence.check(6, {"train/loss": 1.0})
    with pytest.raises(DivergedError, match="turned infinite between steps 7 and 9"):
        divergence.check(9, {"train/loss": math.inf})


def test_a_loss_that_overflowed_does_no_harm_if_its_update_was_skipped(divergence, training):
    training.step.updates[0].num_skipped += 1
    divergence.check(6, {"train/loss": math.inf, "train/loss_scale": 1.0})
    with pytest.raises(DivergedError, match=r"the loss scale fell to 0.25 by step 9, below"):
        divergence.check(9, {"train/loss": 1.0, "train/loss_scale": 0.25})


LATE = ("checkpoint.keep_best=0", "task._target_=tests.unit.train.small_task.LateNan", "checkpoint.asynchronous=false")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["trainer.ema_decay=0.9"],
        ["trainer.eval_every_steps=100", "logger.every_steps=100"],
        # ends early, after the step that a callback chooses
        [
            *("trainer.max_steps=20", "trainer.eval_every_steps=5", "callbacks=[early_stopping]"),
            *("callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=9"),
        ],
    ],
)
def test_a_gradient_that_is_nan_in_the_last_step_alone_fails_the_run_before_its_checkpoint(attempt, directory, words):
    trainer = attempt(*LATE, *words)
    with pytest.raises(
        DivergedError,
        match=r"trained weights are NaN or infinite after step 10: .*2.weight.*; the last good checkpoint is of step 5",
    ):
        trainer.run()
    assert directory.checkpoint_steps() == [5]
    # as with another learning rate
    assert attempt(*LATE, *words, "+task.last=0").run()


@pytest.mark.parametrize("step", [3, 5])
def test_a_norm_that_is_nan_shows_at_the_next_record_or_save(attempt, directory, step):
    trainer = attempt(*LATE, f"+task.last={step}", "trainer.log_grad_norm=true", "logger.every_steps=3")
    with pytest.raises(DivergedError, match=f"after step {step}: "):
        trainer.run()
    assert directory.checkpoint_steps() == []


def test_a_norm_that_overflowed_is_harmless_if_the_weights_are_finite(divergence):
    divergence.check(6, {"train/loss": 1.0, "train/grad_norm": math.inf})


def test_weights_that_an_earlier_version_saved_unchecked_are_refused(attempt):
    assert attempt().run()

    def damage(running):
        with torch.no_grad():
            running.training.module[0].bias[2] = math.inf

    with pytest.raises(DivergedError, match=r"after step 10: 0\.bias; the last good checkpoint is of step 10"):
        attempt().run(damage)


def test_numbers_of_every_type_are_checked():
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        assert _is_finite(torch.ones(3).to(dtype))
        assert not _is_finite(torch.tensor([1.0, math.nan]).to(dtype))
