from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.parallel.fsdp import clip, total_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_it_clips_as_torch_does(dtype, max_norm):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (5,), (1,))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    ours = [parameter.grad.clone() for parameter in parameters]
    norm = total_norm(ours)
    clip(ours, norm, max_norm)
    expected = nn.utils.clip_grad_norm_(parameters, max_norm)
    torch.testing.assert_close(norm, expected)
    for gradient, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
