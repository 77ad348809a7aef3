"""The ports on which rank zero may listen; every rank computes the same ones without communication.

A derived port is a guess and can be in use: rank zero binds the first free candidate, and the others try them in turn.
On a node that jobs share, another program may answer on a candidate port: a rank that connects must check that it
reached its own run.
"""

from __future__ import annotations

import re

LOWEST_PORT = 10_000
"""First derived port: above the privileged ones and most services."""
NUM_PORTS = 22_751
"""A prime; the last derived port is 32750, below the kernel's ephemeral range (32768 to 60999)."""
NUM_CANDIDATES = 9

_STEP_STRIDE = 151
_RESTART_STRIDE = 10 * _STEP_STRIDE
_CANDIDATE_STRIDE = 5_003


def derived(*, job: int, step: int = 0, restart: int = 0) -> tuple[int, ...]:
    """Candidate ports for a job's step, the preferred one first.

    The preferred port is `LOWEST_PORT + (job + 151 step + 1510 restart) mod 22751`, a number in mixed radix: jobs fewer
    than 151 apart, in any of 10 steps and 15 restarts, never share one (151 * 10 * 15 < 22751). Because the modulus is
    prime, a port repeats along one of the three only after 22751 jobs, steps or restarts.

    Args:
        job: number of the job; each task of an array has its own.
        step: number of the step in the job.
        restart: how often the job was requeued.
    """
    preferred = job + _STEP_STRIDE * step + _RESTART_STRIDE * restart
    return tuple(LOWEST_PORT + (preferred + k * _CANDIDATE_STRIDE) % NUM_PORTS for k in range(NUM_CANDIDATES))


def reserved(text: str) -> tuple[int, ...]:
    """Parse SLURM_STEP_RESV_PORTS, the ports that SLURM reserved for the step: `12000-12003` or `12000-12001,12007`.

    Empty if the text can't be read.
    """
    ports: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 0 < first <= last <= 65_535:
            return ()
        ports += range(first, last + 1)
    return tuple(ports)
