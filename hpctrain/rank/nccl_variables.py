"""Environment variables that keep torch's NCCL backend from ending the process on an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping

ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ALIASES = {ASYNC_ERROR_HANDLING: "NCCL_ASYNC_ERROR_HANDLING"}
"""Older names that torch still reads (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp)."""
SET_BY_TORCHRUN = {ASYNC_ERROR_HANDLING: "1"}
"""What torchrun sets if its user doesn't (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
HEARTBEAT_MARGIN_S = 60
"""Seconds between the bound on a collective and the one on torch's watchdog."""
LONGEST_S = 2_147_483
"""torch counts the bound in milliseconds, in an int of 32 bits."""


def nccl_defaults(collective_timeout_s: float) -> dict[str, str]:
    """Return hpctrain's values, by variable.

    With torch's own values, its watchdog thread aborts the process as soon as NCCL or CUDA reports an error. No exit
    record is written then, an error of the task looks like one of the machine, and a checkpoint that is being written
    is lost. With these, the thread only records the error: `World.communication_error` reads what NCCL reports, and
    CUDA's errors are raised where the task waits for the device.

    Args:
        collective_timeout_s: bound on a collective, above the bounds of hpctrain's own watchdog.
    """
    return {
        ASYNC_ERROR_HANDLING: "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # after an error, torch's dump would end all ranks, and write files to the home directory
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # torch's default of 480 s is below hpctrain's bound on a hang
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(min(math.ceil(collective_timeout_s) + HEARTBEAT_MARGIN_S, LONGEST_S)),
    }


def set_nccl_variables(environ: MutableMapping[str, str], collective_timeout_s: float) -> None:
    """Set the variables that the user didn't; before the process group is made.

    Args:
        environ: of this process.
        collective_timeout_s: as for `nccl_defaults`.
    """
    kept = user_nccl_variables(environ, collective_timeout_s)
    for name, value in nccl_defaults(collective_timeout_s).items():
        if name not in kept and ALIASES.get(name) not in kept:
            environ[name] = value


def user_nccl_variables(environ: Mapping[str, str], collective_timeout_s: float) -> dict[str, str]:
    """Return the variables that the user set to other values than hpctrain's.

    Args:
        environ: of this process.
        collective_timeout_s: as for `nccl_defaults`.
    """
    kept = {}
    by_torchrun = SET_BY_TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else {}
    for name, default in nccl_defaults(collective_timeout_s).items():
        for known in filter(None, (name, ALIASES.get(name))):
            value = environ.get(known)
            if value is not None and value not in (default, by_torchrun.get(known)):
                kept[known] = value
    return kept
