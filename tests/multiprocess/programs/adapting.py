"""A user's optimizer that keeps what it learns in its groups, as Prodigy, schedule-free and Apex's fused ones do."""

from __future__ import annotations

import torch


class Adapting(torch.optim.Optimizer):
    """SGD whose step length `d` grows; its groups have `k` from the start, and `step` only after the first step."""

    def __init__(self, params, lr=0.01, growth=1.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "growth": growth, "weight_decay": weight_decay, "d": 1.0, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= group["growth"]
            group["step"] = group.get("step", 0) + 1
            assert group["step"] == group["k"]
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(parameter.grad, alpha=-group["lr"] * group["d"])
