"""What a run reports of its speed: FLOPs, the share of the GPU's peak, and the line that makes the host wait."""

from __future__ import annotations

import inspect

import pytest

from hpctrain.run.bottleneck import read_bottleneck
from tests.gpu.programs.gpu_tasks import Peeking

pytestmark = pytest.mark.gpu
LAYERS, WIDTH, LENGTH, VOCABULARY = 2, 128, 128, 256
RUNS = {
    "text": [
        "task=text",
        f"model.num_layers={LAYERS}",
        f"model.width={WIDTH}",
        "precision=bf16",
        "trainer.global_batch_size=32",
        "trainer.max_steps=60",
        "logger.every_steps=5",
    ],
    "peeking": [
        "task=custom",
        "task._target_=tests.gpu.programs.gpu_tasks.Peeking",
        "trainer.global_batch_size=16",
        "trainer.max_steps=60",
        "trainer.max_epochs=null",
        "logger.every_steps=20",
    ],
}


@pytest.fixture(scope="module")
def measured(shells, at_once):
    """Each run's shell, and what was found to hold it back."""
    at_once(lambda name: shells(name).train(*RUNS[name]), RUNS)
    return {name: (shells(name), shells(name).run.newest(read_bottleneck)) for name in RUNS}


def test_the_flops_of_a_text_model_are_counted(measured):
    """Six per weight of a matrix and token, and those of the attention."""
    _, found = measured["text"]
    weights = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH
    attention = LAYERS * 12 * LENGTH * WIDTH
    expected = LENGTH * (6 * weights + attention)
    # a fused kernel of the attention counts its recomputation, or only what the causal mask leaves
    assert 0.9 * LENGTH * 6 * weights < found.flops_per_sample < 1.3 * expected


@pytest.mark.core
@pytest.mark.needs_cuda("the peak of a CPU isn't known")
def test_the_utilisation_is_logged_and_is_a_share(measured):
    shell, found = measured["text"]
    logged = shell.logged("throughput/mfu")
    assert logged
    assert all(0 < value < 1 for value in [*logged, found.mfu])


@pytest.mark.core
@pytest.mark.needs_cuda("nothing waits for a CPU")
def test_the_line_that_waits_for_the_gpu_in_each_step_is_named(measured):
    shell, found = measured["peeking"]
    lines, first = inspect.getsourcelines(Peeking.loss)
    number = first + next(place for place, line in enumerate(lines) if ".item()" in line)
    assert found.text.startswith("the host waits for the GPU in every step at ")
    assert f"gpu_tasks.py:{number}: an .item(), .cpu()" in found.text
    printed, _ = shell.type("status", str(shell.run.path))
    assert f"gpu_tasks.py:{number}" in printed


def test_a_bottleneck_is_found_in_the_background_of_each_run(measured):
    for shell, found in measured.values():
        assert found.steps_timed >= 3
        assert sum(found.shares.values()) == pytest.approx(1, abs=0.01)
        assert found.text in shell.type("status", str(shell.run.path))[0]
