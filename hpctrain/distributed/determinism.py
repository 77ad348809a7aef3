"""What torch needs to give the same bits twice."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_determinism(on: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Deterministic algorithms only, or torch's default; for the whole process, before CUDA is initialised.

    An operation that has no deterministic algorithm then raises, with its name. cuBLAS reads its variable when it is
    initialised; one that the user has set stays.

    Args:
        on: `trainer.deterministic`.
        environ: of this process.
    """
    if on:
        environ.setdefault(WORKSPACE, ":4096:8")
        torch.backends.cudnn.benchmark = False
    if on or torch.are_deterministic_algorithms_enabled():
        # not without need: it imports torch's compiler
        torch.use_deterministic_algorithms(on)
        torch.backends.cudnn.deterministic = on
