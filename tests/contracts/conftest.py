"""Facts about the configuration that several contracts use."""

from __future__ import annotations

import pytest

ON_A_GPU = ["cluster=slurm", "cluster.gpus_per_node=1"]
NEEDED = {
    "task=custom": ["task._target_=hpctrain.tasks.digits.Digits"],
    "task=image_folder": ["task.data=."],
    "task=tokens": ["task.data=."],
    "optimizer=named": ["optimizer.named.all={_target_: torch.optim.SGD, lr: 0.1}"],
    "optimizer=custom": ["optimizer._target_=torch.optim.RMSprop"],
    "schedule=custom": ["schedule._target_=torch.optim.lr_scheduler.StepLR", "+schedule.step_size=2"],
    "schedule=step": ["schedule.drop_at_epochs=[3,6]"],
    "precision=tf32": ON_A_GPU,
    "parallel=data_parallel": ON_A_GPU,
}


@pytest.fixture(scope="session")
def needed() -> dict[str, list[str]]:
    """The overrides that an option requires, by GROUP=OPTION."""
    return NEEDED
