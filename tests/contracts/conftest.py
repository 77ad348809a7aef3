"""Facts about the configuration that several contracts use."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.types import RunMode

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


COMPOSED: dict[Any, bytes] = {}
"""What Hydra composed, pickled."""


@pytest.fixture
def hydra_composes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes the same options once for all cases, which takes most of the time of each.

    The cases differ in values, which hpctrain applies itself. With folders of a test's own, each case composes.
    """
    compose = Hydra.compose_config

    def composed(self: Hydra, name: str, overrides: Sequence[str], mode: RunMode, **options: Any) -> Any:
        places = [(source.provider, source.path) for source in self.config_loader.get_sources()]
        if any(provider in ("command-line", "working-directory") for provider, _ in places):
            return compose(self, name, list(overrides), mode, **options)
        key = (tuple(places), name, tuple(overrides), mode, tuple(sorted(options.items())))
        if key not in COMPOSED:
            COMPOSED[key] = pickle.dumps(compose(self, name, list(overrides), mode, **options))
        return pickle.loads(COMPOSED[key])

    monkeypatch.setattr(Hydra, "compose_config", composed)
