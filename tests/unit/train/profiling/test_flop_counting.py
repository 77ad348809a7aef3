from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.data.plan import BatchPlan
from hpctrain.train.profiling.flop_counting import FlopCounting

PLAN = BatchPlan(1200, global_batch_size=12, micro_batch_size=6, world_size=1, drop_last=False)


class Ragged(nn.Linear):
    """Has a product that torch has no formula for."""

    def forward(self, features):
        parts = torch.nested.nested_tensor([features[:2], features[2:]])
        product = torch.bmm(parts, torch.nested.nested_tensor([torch.eye(8), torch.eye(8)]))
        return super().forward(torch.cat(product.unbind()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("kind", "flops"), [(nn.Linear, 2 * 2 * 8 * 10), (Ragged, None)])
def test_a_step_is_done_whether_its_flops_are_known_or_not(step_over, supply, lone_world, kind, flops):
    model = kind(8, 10)
    before = model.weight.detach().clone()
    counting = FlopCounting(step_over(model), PLAN, lone_world, "fp32", None)
    counting.in_step(0, supply())
    assert counting.per_sample == flops
    assert not torch.equal(model.weight, before)
