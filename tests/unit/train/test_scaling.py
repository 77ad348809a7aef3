import math

import pytest
import torch

from hpctrain.distributed.compiler import spare_compiler
from hpctrain.train.scaling import ScaledUpdate


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spared", [False, True])
def test_it_says_whether_the_weights_were_updated(fused, spared):
    if spared:
        spare_compiler()
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    update = ScaledUpdate(scaler, optimizer)
    for factor, updated, scale in [(1.0, True, 8.0), (math.inf, False, 4.0), (math.nan, False, 2.0), (1.0, True, 2.0)]:
        before = weight.detach().clone()
        scaler.scale((weight * factor).sum()).backward()
        assert update() is updated
        optimizer.zero_grad()
        assert torch.equal(weight, before) is not updated
        assert scaler.get_scale() == scale
