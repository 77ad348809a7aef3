from __future__ import annotations

import math

import pytest

from hpctrain.errors import DivergedError
from hpctrain.train.divergence import Divergence
from hpctrain.train.parts import Parts


class Written:
    """Stands where no checkpoint is in flight."""

    def finish(self):
        pass


@pytest.fixture
def parts(compose_small, lone_world):
    return Parts(compose_small("precision.min_loss_scale=0.5"), lone_world)


@pytest.fixture
def divergence(parts, directory):
    return Divergence(parts, directory, Written(), 3)


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


def test_a_loss_that_overflowed_does_no_harm_if_its_update_was_skipped(divergence, parts):
    parts.step.updates[0].num_skipped += 1
    divergence.check(6, {"train/loss": math.inf, "train/loss_scale": 1.0})
    with pytest.raises(DivergedError, match=r"the loss scale fell to 0.25 by step 9, below"):
        divergence.check(9, {"train/loss": 1.0, "train/loss_scale": 0.25})
