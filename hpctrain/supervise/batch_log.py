"""The batch script's log."""

from __future__ import annotations

import contextlib
import logging
import sys


def log_to_stdout() -> None:
    """Log into the batch script's log; not by way of the root logger, which submitit's lines would then reach twice."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("hpctrain")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def say(text: str) -> None:
    """Say something in the batch script's log, which may be on a full disk."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
