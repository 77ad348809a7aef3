"""How exact the operations of a run are, by its precision."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
WORDS = (
    "task=custom",
    "task._target_=tests.gpu.programs.gpu_tasks.Numerics",
    "trainer.max_steps=2",
    "logger.every_steps=1",
)
MEASURED = ("train/matmul_error", "train/convolution_error", "train/convolution_gradient_error")
IN_FP32, IN_TF32 = 1e-5, 1e-4
"""Bounds on the error relative to float64: fp32 has about 1e-7 to 1e-6; TF32, with 10 bits of mantissa, 3e-4."""


@pytest.fixture(scope="module")
def measured(shells, at_once):
    """The largest error of each operation, in each of two precisions."""

    def train(precision):
        shell = shells(precision)
        shell.train(*WORDS, f"precision={precision}")
        return {name: max(shell.logged(name)) for name in MEASURED}

    kinds = ["fp32", "tf32"]
    return dict(zip(kinds, at_once(train, kinds), strict=True))


@pytest.mark.core
@pytest.mark.parametrize("name", MEASURED)
def test_fp32_is_not_tf32(measured, name):
    assert 0 < measured["fp32"][name] < IN_FP32


@pytest.mark.needs_cuda("TF32")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="a GPU without TF32"
)
@pytest.mark.parametrize("name", MEASURED)
def test_tf32_is_visible(measured, name):
    assert measured["tf32"][name] > IN_TF32
    assert measured["tf32"][name] > 10 * measured["fp32"][name]
