"""What several contracts need to know of the configuration."""

from __future__ import annotations

import pytest

ON_A_GPU = ["cluster=slurm", "cluster.gpus_per_node=1"]
NEEDED = {
    "task=custom": ["task._target_=hpctrain.tasks.digits.Digits"],
    "task=image_folder": ["task.data=."],
    "task=tokens": ["task.data=."],
    "optimizer=custom": ["optimizer._target_=torch.optim.RMSprop"],
    "schedule=step": ["schedule.drop_at_epochs=[3,6]"],
    "precision=tf32": ON_A_GPU,
    "parallel=data_parallel": ON_A_GPU,
}


@pytest.fixture(scope="session")
def needed() -> dict[str, list[str]]:
    """By group=option, the overrides that an option can't do without."""
    return NEEDED
