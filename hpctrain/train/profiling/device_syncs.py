"""Lines of a user's code that make the host wait for the GPU, by torch's sync debug mode."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import TextIO

import torch

MESSAGE = "called a synchronizing CUDA operation"
"""How torch's warning begins (c10/cuda/CUDAFunctions.cpp)."""
NOTICE = "Synchronization debug mode is a prototype"
"""What torch says once when the mode is set (torch/csrc/cuda/Module.cpp)."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TRAINED = (f"{_PACKAGE}tasks{os.sep}", f"{_PACKAGE}models{os.sep}")
"""What comes with hpctrain, and could be a user's as well."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep


@contextmanager
def named_syncs(found: Counter[str], device_mode: ModuleType = torch.cuda) -> Iterator[None]:
    """Count, by place, the calls inside that wait for the GPU.

    A place is the innermost line that is neither torch's nor the standard library's: ``task.py:41``, from the current
    folder where it is in there. What hpctrain's own loop waits for isn't counted. Other warnings pass.

    Args:
        found: is added to.
        device_mode: has `get_sync_debug_mode` and `set_sync_debug_mode`.
    """
    mode = device_mode.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=MESSAGE)
        warnings.filterwarnings("ignore", message=NOTICE)
        show = warnings.showwarning

        def note(  # noqa: PLR0917 - the signature of warnings.showwarning
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not str(message).startswith(MESSAGE):
                show(message, category, filename, lineno, file, line)
            elif place := place_of(sys._getframe(1)):
                found[place] += 1

        warnings.showwarning = note
        device_mode.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            device_mode.set_sync_debug_mode(mode)


def place_of(frame: FrameType | None) -> str | None:
    """File and line of the innermost frame of a user's; None where a line of hpctrain's own is met before.

    Args:
        frame: where to begin, going outwards.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.startswith(_TRAINED):
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
