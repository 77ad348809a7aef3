"""A GPU that is lost for this process: what used it is never freed, and the process ends without freeing it.

After a device-side assert, an illegal access or an ECC error, each later call of CUDA in the process fails, too. When
torch frees a page-locked tensor that was copied without waiting, or a GPU tensor after `record_stream`, it records an
event in a destructor, which mustn't raise: the process dies of SIGABRT (pytorch#178154; torch 2.11 and 2.13,
ATen/core/CachingHostAllocator.h and c10/cuda/CUDACachingAllocator.cpp). A rank would leave no exit record, and a label
out of range would look like a broken machine.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from hpctrain.attempt.gpu_errors import DEVICE_CODE_ERROR, GPU_UNUSABLE
from hpctrain.errors import error_text

_is_lost = False


def has_lost_gpu() -> bool:
    """Whether an error has shown that the GPU is lost: leave this process by `os._exit`."""
    return _is_lost


def keep_if_lost(error: BaseException, *used: object) -> bool:
    """Keep an error, and all that its frames hold, until the process ends, if it shows that the GPU is lost.

    Args:
        error: that ends a training, or a later one.
        used: what else refers to tensors.

    Returns:
        Whether the GPU is lost.
    """
    global _is_lost  # noqa: PLW0603 - of the process, as the GPU is
    if not _is_lost and not _shows_loss(error):
        return False
    _is_lost = True
    for kept in (error, *used):
        # a reference that is never given back: at exit, Python empties lists and modules
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return True


@contextmanager
def closing_unless_lost(batches: Generator[Any, None, None]) -> Iterator[Generator[Any, None, None]]:
    """Close the generator at the end, as `contextlib.closing` does, unless an error shows that the GPU is lost.

    Closed, it would drop the batches that it holds. Its loading processes end with this process.
    """
    is_kept = False
    try:
        yield batches
    except BaseException as error:
        is_kept = keep_if_lost(error, batches)
        raise
    finally:
        if not is_kept:
            batches.close()


def error_of_gpu(error: BaseException) -> BaseException:
    """Return an error that names what happened to the GPU, if this one is only the first that noticed it.

    The first call that fails may be of a library with its own words for it (CUBLAS_STATUS_EXECUTION_FAILED, or cuDNN's
    "unable to find an engine to execute this computation"), or the task may raise another error. Asked again, CUDA
    repeats its error.
    """
    report = "" if _names_loss(error) else _gpu_report()
    if not report:
        return error
    named = RuntimeError(f"{report}; noticed by {type(error).__name__}: {error_text(error)}")
    named.__cause__ = error
    return named


def _shows_loss(error: BaseException) -> bool:
    return _names_loss(error) or bool(_gpu_report())


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
