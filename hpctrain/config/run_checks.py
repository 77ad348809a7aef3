"""Checks of what every run has, whether it is a training or a program."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.config.cluster import Slurm
from hpctrain.config.container import check_container, check_mounted
from hpctrain.config.identity import flat
from hpctrain.config.paths import check_run_directory
from hpctrain.config.resources import resources_of
from hpctrain.config.run_config import RunConfig
from hpctrain.errors import ConfigError


def check_run(config: RunConfig, *, world_size: int | None = None) -> None:
    """Check the texts, the run directory and the machines of a run.

    Args:
        config: each value is already checked by itself.
        world_size: number of ranks that already run; None for what the configuration asks for.

    Raises:
        ConfigError: the first value that can't work.
    """
    slurm = isinstance(config.cluster, Slurm)
    for key, value in flat(config).items():
        _check_text(key, value)
    if slurm or config.run_dir is not None:
        check_run_directory(config.run_dir or "runs", in_batch_script=slurm)
    if config.nodes > 1 and not slurm and world_size is None:
        problem = "needs a cluster, but cluster=local is one machine"
        raise ConfigError("nodes", config.nodes, problem, "add cluster=slurm")
    if isinstance(config.cluster, Slurm) and world_size is None:
        container = config.cluster.container
        check_container(container, config.cluster.srun_args, resources_of(config).processes_per_node)
        check_mounted(container, "run_dir", str(Path(config.run_dir or "runs").absolute()))


def _check_text(key: str, value: object) -> None:
    """Refuse texts that can't be stored in config.yaml, or passed to another program."""
    for text in value if isinstance(value, list) else [value]:
        # a lone surrogate is how Python represents a byte of the command line that isn't UTF-8
        if isinstance(text, str) and (found := re.search(r"[\x00\ud800-\udfff]", text)) is not None:
            kind = "a NUL character" if found[0] == "\0" else "a byte that is not UTF-8"
            raise ConfigError(key, ascii(text), f"contains {kind}", "correct it")
