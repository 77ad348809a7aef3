"""Training in each precision, the loss scale, and what a checkpoint has of it."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16_pure", "fp16_master")
STEPS = 60


@pytest.fixture(scope="module")
def trained(shells, at_once):
    """A run in each precision."""
    at_once(lambda name: shells(name).train(f"precision={name}", f"trainer.max_steps={STEPS}"), PRECISIONS)
    return shells


@pytest.mark.core
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns_in_every_precision(precision, trained):
    assert trained(precision).inspected["step"] == STEPS
    found = trained(precision).logged("train/loss")
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_checkpoint_is_on_the_cpu_in_the_format_that_is_trained(precision, trained):
    model = trained(precision).weights(STEPS)
    assert {value.device.type for value in model.values()} == {"cpu"}
    expected = torch.bfloat16 if precision == "bf16_pure" else torch.float32
    assert {value.dtype for value in model.values() if value.is_floating_point()} == {expected}


@pytest.mark.parametrize("precision", ["fp16", "fp16_master"])
@pytest.mark.parametrize("fused", ["true", "false"])
def test_updates_that_overflow_are_skipped_and_the_scale_is_logged(precision, fused, shell):
    words = ["precision.initial_loss_scale=1e9", f"optimizer.fused={fused}", "logger.every_steps=10"]
    shell.train(f"precision={precision}", *words, "trainer.max_steps=40")
    assert shell.logged("train/skipped_updates")[-1] > 0
    assert shell.logged("train/loss_scale")[-1] < 1e9
    found = shell.logged("train/loss")
    assert found[-1] < found[0]


def test_a_scale_that_collapses_stops_the_run(shell):
    words = ["precision=fp16", "precision.initial_loss_scale=1e18", "precision.min_loss_scale=1e17"]
    shell.train(*words, "trainer.max_steps=100", "logger.every_steps=10", code=1)
    assert shell.last_line["reason"] == "failed"
    assert "the loss scale fell to" in shell.last_line["detail"]
