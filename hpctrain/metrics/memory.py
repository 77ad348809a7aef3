"""How much memory this rank uses: a GPU's as torch's allocator counts it, the process's own otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


class Memory:
    """Use now and at its highest, in bytes; 0 where the system doesn't tell.

    Of a process only what is its own counts: pages of mapped files, a token file's say, come and go as they please.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        # kept open: one system call of half a microsecond instead of three
        self._statm = os.open(_STATM, os.O_RDONLY) if self._device is None and _STATM.exists() else None

    def used(self) -> int:
        """In use now, bytes: by tensors on a GPU, by the process without mapped files elsewhere."""
        if self._device is not None:
            return torch.cuda.memory_allocated(self._device)
        if self._statm is None:
            return 0
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE

    def peak(self) -> int:
        """The most that was in use, bytes: by tensors on a GPU, by the process with everything elsewhere (proc(5))."""
        if self._device is not None:
            return torch.cuda.max_memory_allocated(self._device)
        try:
            found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return 0 if found is None else int(found[1]) * 1024

    def close(self) -> None:
        """Look no more."""
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None
