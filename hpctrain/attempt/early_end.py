"""The end of a rank that can't begin: an exit record, written before anything else of the rank is known."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Mapping

from hpctrain.attempt.rank_python import other_version
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import ERROR_PREFIX, HpctrainError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.launcher import Handover
from hpctrain.run.reason import Reason
from hpctrain.terminal import visible


def record_early_end(directory: RunDirectory, reason: Reason, message: str, environ: Mapping[str, str]) -> None:
    """Leave an exit record of a rank that can't begin, such as for a full disk of its node, if that is possible.

    Args:
        directory: of the run.
        reason: why it can't.
        message: the same in one line.
        environ: of the rank; without an attempt in it, nothing is written.
    """
    with contextlib.suppress(OSError, HpctrainError):
        handover = Handover.read(environ)
        if handover.attempt is not None:
            rank = ClusterEnvironment.from_environment(environ).rank
            host = socket.gethostname()
            record = ExitRecord(rank=rank, host=host, reason=reason, step=0, message=message, time=time.time())
            record.write(directory.claim(handover.attempt))


def refuse_other_version(directory: RunDirectory, environ: Mapping[str, str]) -> bool:
    """Print and record, as the end of this rank, that its hpctrain isn't the launcher's; return whether it isn't."""
    problem = other_version(Handover.read(environ).version)
    if problem:
        print(f"{ERROR_PREFIX}{visible(problem)}", file=sys.stderr, flush=True)  # noqa: T201 - before there is a log
        record_early_end(directory, Reason.FAILED, problem, environ)
    return bool(problem)
