"""Training with the compiler's CUDA graphs (trainer.compile_mode=reduce-overhead)."""

from __future__ import annotations

import pytest
import torch

from hpctrain.errors import ExitCode

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
STEPS = 12
WORDS = (
    "task=custom",
    "task._target_=tests.gpu.programs.gpu_tasks.Pictures",
    "+task.num_samples=64",
    "trainer.global_batch_size=16",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.log_grad_norm=true",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "logger.every_steps=1",
)
COMPILED = {
    "not compiled": [],
    "default": ["trainer.compile=true"],
    "CUDA graphs": ["trainer.compile=true", "trainer.compile_mode=reduce-overhead"],
}
"""Without dropout, whose draws a compiled model makes differently; with SGD, because Adam would make an update as large
as any other from a gradient that is only rounding, such as that of a bias before a batch norm.
"""


@pytest.fixture(scope="module")
def trained(shells, at_once):
    at_once(lambda name: shells(name).train(*WORDS, *COMPILED[name]), COMPILED)
    return shells


def test_cuda_graphs_are_refused_with_accumulation(shell):
    words = [*WORDS, *COMPILED["CUDA graphs"], "trainer.micro_batch_size=8"]
    _, errors = shell.train(*words, code=ExitCode.BAD_CONFIGURATION)
    (line,) = errors.splitlines()
    assert line.startswith("hpctrain: error: trainer.compile_mode=reduce-overhead: ")
    assert "trainer.micro_batch_size=16" in line
    assert not shell.run.path.exists()


@pytest.mark.parametrize("other", ["not compiled", "default"])
@pytest.mark.parametrize("measured", ["train/loss", "train/grad_norm"])
def test_losses_and_gradients_with_cuda_graphs_are_those_without(trained, other, measured):
    """Of each step, up to the order of summation; they differ more if a graph reuses a gradient's memory too early."""
    found, expected = trained("CUDA graphs").logged(measured), trained(other).logged(measured)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("other", ["not compiled", "default"])
def test_weights_with_cuda_graphs_are_those_without(trained, other):
    found, expected = trained("CUDA graphs").weights(STEPS), trained(other).weights(STEPS)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def test_it_learns_with_cuda_graphs(trained):
    found = trained("CUDA graphs").logged("train/loss")
    assert found[-1] < 0.7 * found[0]
