"""The memory use of this rank: that of tensors on a GPU, by torch's allocator; on a CPU that of the process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

# not psutil, which looks for the number of this process: a container may see the machine's /proc, or none
_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


class Memory:
    """Memory in use now and at its peak, in bytes; 0 if the system doesn't report it.

    Only a process's own pages count: the kernel evicts pages of mapped files, such as token files, at any time.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def used(self) -> int:
        """Bytes in use now: by tensors on a GPU, otherwise by the process without mapped files."""
        if self._device is not None:
            return torch.cuda.memory_allocated(self._device)
        try:
            _, resident, shared, *_ = _STATM.read_bytes().split()
        except OSError:
            return 0
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def peak(self) -> int:
        """Bytes in use at the peak: by tensors on a GPU, otherwise by the process with mapped files (proc(5))."""
        if self._device is not None:
            return torch.cuda.max_memory_allocated(self._device)
        # not getrusage(2): its ru_maxrss survives exec, so it would be the peak of the process that started this one
        try:
            match = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return 0 if match is None else int(match[1]) * 1024
