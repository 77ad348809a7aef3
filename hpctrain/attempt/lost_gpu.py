"""Errors of a GPU: what their messages report, and the end of a process that has lost its GPU.

After a device-side assert, an illegal access or an ECC error, each later call of CUDA in the process fails, too. When
torch frees a page-locked tensor that was copied without waiting, or a GPU tensor after `record_stream`, it records an
event in a destructor, which mustn't raise: the process dies of SIGABRT (pytorch#178154; torch 2.11 and 2.13,
ATen/core/CachingHostAllocator.h and c10/cuda/CUDACachingAllocator.cpp). A rank would leave no exit record, and a label
out of range would look like a broken machine. So what the GPU has used is retained until the process ends.

Sources of the messages: cudaGetErrorString of CUDA 12.9; hipGetErrorString of ROCm's clr; torch's
c10/cuda/CUDAFunctions.cpp and ATen/cuda/Exceptions.h; NCCL's src/include/alloc.h and checks.h, and RCCL's copies.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from hpctrain.errors import error_text

_REPORTED = (
    r"((CUDA|HIP) error: |(Cuda|HIP) failure (\d+ )?'|cuda runtime error \(\d+\) : |GetDeviceCount\(\)\..* Error \d+: )"
)
"""What comes before the text of an error code: from torch, from NCCL, from old torch, and when torch counts GPUs."""

GPU_OUT_OF_MEMORY = re.compile(
    rf"(CUDA|HIP) out of memory|{_REPORTED}out of memory|Failed to CUDA calloc"
    # cuBLAS, cuDNN, cuSOLVER, cuFFT, and AMD's: torch's allocator left them too little
    r"|\b[A-Z]+_(STATUS_)?ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    # what cublasCreate returns if the GPU is nearly full; from other calls it is a mistake in the code
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate"
)
"""The GPU has too little memory for the task; the same happens in every attempt."""

GPU_UNUSABLE = re.compile(
    rf"{_REPORTED}("
    r"uncorrectable (ECC|NVLink) error|Invalid access of peer GPU memory over nvlink or a hardware error"
    r"|(all )?CUDA-capable device\S* (is/)?are busy or unavailable|no (CUDA|ROCm)-capable device is detected"
    # the fabric manager isn't running; the driver was updated and the node not restarted; the MPS server is gone
    r"|system not yet initialized|system has unsupported display driver|.*MPS (client|server)"
    # what is left of a GPU that has fallen off the bus; HIP prints this for every error code without a text
    r"|(?<!HIP error: )(?<!HIP failure ')unknown error"
    r")"
    # torch's messages for codes 3 and 999 when it counts the GPUs; "initialization error" later is that of a fork
    r"|CUDA driver initialization failed|CUDA unknown error - this may be due to"
)
"""The machine is the cause: another node, or the same one after a repair, may run the task."""

DEVICE_CODE_ERROR = re.compile(
    r"device-side assert triggered|an illegal (memory access|instruction) was encountered|misaligned address"
    r"|invalid program counter|operation not supported on global/shared address space|unspecified launch failure"
    # of the kernel's call stack, not of the hardware
    r"|hardware stack error"
)
"""The code that runs on the GPU made a mistake: an index out of bounds in the task, or a kernel's own."""

_is_lost = False


def has_lost_gpu() -> bool:
    """Whether an error has shown that the GPU is lost: leave this process by `os._exit`."""
    return _is_lost


def retain_if_gpu_lost(error: BaseException, *holders: object) -> bool:
    """Retain an error, and all that its frames hold, until the process ends, if it shows that the GPU is lost.

    Args:
        error: that ended a training, or a later one.
        holders: other objects that refer to tensors.

    Returns:
        Whether the GPU is lost.
    """
    global _is_lost  # noqa: PLW0603 - the GPU is lost for the whole process
    if not _is_lost and not _shows_loss(error):
        return False
    _is_lost = True
    for holder in (error, *holders):
        # a reference that is never given back: at exit, Python empties lists and modules
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))
    return True


@contextmanager
def closing_unless_lost(batches: Generator[Any, None, None]) -> Iterator[Generator[Any, None, None]]:
    """Close the generator at the end, as `contextlib.closing` does, unless an error shows that the GPU is lost.

    Closed, it would drop the batches that it holds. Its loading processes end with this process.
    """
    is_retained = False
    try:
        yield batches
    except BaseException as error:
        is_retained = retain_if_gpu_lost(error, batches)
        raise
    finally:
        if not is_retained:
            batches.close()


def with_cuda_message(error: BaseException) -> BaseException:
    """Return an error with CUDA's own message, if this one is only a consequence of an earlier error on the GPU.

    The first call that fails may be a library's, with its own words for it (CUBLAS_STATUS_EXECUTION_FAILED, or cuDNN's
    "unable to find an engine to execute this computation"), or the task may raise another error. Asked again, CUDA
    repeats its error.
    """
    report = "" if _names_loss(error) else _gpu_report()
    if not report:
        return error
    cuda_error = RuntimeError(f"{report}; noticed by {type(error).__name__}: {error_text(error)}")
    cuda_error.__cause__ = error
    return cuda_error


def _shows_loss(error: BaseException) -> bool:
    # a text alone may be quoted, or be about a GPU that was only busy: what is lost repeats its error
    is_fault = type(error).__name__ == "AcceleratorError" and DEVICE_CODE_ERROR.search(error_text(error))
    return bool(is_fault or _gpu_report())


def _names_loss(error: BaseException) -> bool:
    text = error_text(error) if isinstance(error, RuntimeError) else ""
    return bool(DEVICE_CODE_ERROR.search(text) or GPU_UNUSABLE.search(text))


def _gpu_report() -> str:
    """The first line of the error that CUDA reports; empty if it reports none, or isn't used."""
    # this module is also imported where torch isn't
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return error_text(error).partition("\n")[0] or type(error).__name__
    return ""
