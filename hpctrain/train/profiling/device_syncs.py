"""Find the lines of a user's code that make the host wait for the GPU, with torch's sync debug mode."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

MESSAGE = "called a synchronizing CUDA operation"
"""Start of torch's warning (c10/cuda/CUDAFunctions.cpp)."""
NOTICE = "Synchronization debug mode is a prototype"
"""Start of the warning that torch emits once when the mode is set (torch/csrc/cuda/Module.cpp)."""
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_USER_LIKE = (f"{_PACKAGE}tasks{os.sep}", f"{_PACKAGE}models{os.sep}")
"""Tasks and models of hpctrain count as a user's: their lines can be changed, or copied."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep


@contextmanager
def counted_syncs(found: Counter[str], device_mode: ModuleType = torch.cuda) -> Iterator[None]:
    """Count the calls in the ``with`` block that wait for the GPU, by the line that made them.

    The line is the innermost one that is neither torch's nor the standard library's, such as ``task.py:41``; a
    path inside the working directory is relative to it. Waits of hpctrain's own loop aren't counted. Other warnings
    pass.

    Args:
        found: the counts are added to it.
        device_mode: has `get_sync_debug_mode` and `set_sync_debug_mode`.
    """
    mode = device_mode.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=MESSAGE)
        warnings.filterwarnings("ignore", message=NOTICE)
        show = warnings.showwarning

        # not by `filename`: that is the innermost Python frame, often one of torch's own
        def count(message: Warning | str, *rest: Any, **named: Any) -> None:
            if not str(message).startswith(MESSAGE):
                show(message, *rest, **named)
            elif place := user_line(sys._getframe(1)):
                found[place] += 1

        warnings.showwarning = count
        device_mode.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            device_mode.set_sync_debug_mode(mode)


def user_line(frame: FrameType | None) -> str | None:
    """Return file and line of the innermost frame of a user's code; None if the search meets hpctrain's own code first.

    Args:
        frame: the innermost frame; the search goes outwards.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.startswith(_USER_LIKE):
            return None
        if not _is_library(path):
            return f"{_short(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _is_library(path: str) -> bool:
    return path.startswith((_TORCH, "<")) or (path.startswith(_LIBRARY) and "site-packages" not in path)


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
