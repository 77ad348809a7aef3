"""The Hydra launcher: what a sweeper hands over in one batch becomes one array."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hpctrain.errors import ExitCode, RunFailedError
from hpctrain.run.directory import RunDirectory
from hpctrain.status.metrics import read_metrics
from hpctrain.sweep.batch import Sweep, refuse_mixed

if TYPE_CHECKING:
    from hpctrain.config.compose import Composer

MODULE = "hydra_plugins.hpctrain"
"""Hydra takes launchers from this package alone."""
OBJECTIVE = "eval/loss"
"""What a sweeper that optimises is told: the last value of this metric."""


class ArrayLauncher(Launcher):
    """Launches the batches of a sweeper; `multirun` sets the composer and the sweep before Hydra makes one."""

    composer: Composer
    sweep: Sweep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing of Hydra's is needed: runs are composed as a single one would be."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Launch one batch.

        Returns:
            Per run: its last evaluation loss where the runs were waited for, else None.
        """
        configs = [self.composer.compose(own(overrides)) for overrides in job_overrides]
        refuse_mixed(configs)
        codes = self.sweep.launch(configs, initial_job_idx)
        ended = configs[0].cluster.wait or configs[0].cluster.kind == "local"
        returns = []
        for number, overrides in enumerate(job_overrides):
            code = codes[number] if number < len(codes) else ExitCode.INTERRUPTED
            failed = code != ExitCode.FINISHED
            value: object = last_objective(self.sweep.run(initial_job_idx + number)) if ended else None
            if failed:
                value = RunFailedError(f"run {initial_job_idx + number} ended with exit code {int(code)}")
            status = JobStatus.FAILED if failed else JobStatus.COMPLETED
            returns.append(JobReturn(overrides=overrides, status=status, _return_value=value))
        return returns


def own(overrides: Sequence[str]) -> list[str]:
    """The overrides that are not Hydra's."""
    return [override for override in overrides if not override.lstrip("+~").startswith("hydra")]


def last_objective(directory: RunDirectory) -> float | None:
    """The run's last evaluation loss; None where it has none."""
    values = [record.values[OBJECTIVE] for record in read_metrics(directory.metrics) if OBJECTIVE in record.values]
    return values[-1] if values and math.isfinite(values[-1]) else None


def register() -> None:
    """Make the launcher known to Hydra, which asks that it lives in `hydra_plugins`."""
    module = types.ModuleType(MODULE)
    launcher = type("ArrayLauncher", (ArrayLauncher,), {"__module__": MODULE})
    module.__dict__["ArrayLauncher"] = launcher
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    sys.modules[MODULE] = module
    Plugins.instance().register(launcher)
