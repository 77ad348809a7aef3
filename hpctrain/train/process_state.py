"""Restore what training changes in its process, for a program that continues afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from hpctrain.attempt.lost_gpu import has_lost_gpu
from hpctrain.checkpoint.rng import restore_rng, rng_state


@contextmanager
def process_state_restored() -> Iterator[None]:
    """After the context, random states and torch's global settings are those from before it.

    Inside of it, what the program has set for itself changes no weights: gradients are computed (`torch.no_grad`), in
    the run's precision (`torch.autocast`, `torch.set_default_dtype`), and tensors are made on the CPU unless a device
    is named (`torch.set_default_device`, `with torch.device`).
    """
    cpu = torch.device("cpu")
    # only if it is needed: inside of it, each call of torch takes longer
    on_cpu: AbstractContextManager[object] = nullcontext() if torch.get_default_device() == cpu else cpu
    with on_cpu, _global_state_restored():
        dtype = torch.get_default_dtype()
        with torch.inference_mode(False), torch.enable_grad(), _outside_of_autocast():
            torch.set_default_dtype(torch.float32)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)


@contextmanager
def _outside_of_autocast() -> Iterator[None]:
    # a context that turns autocast off isn't enough: torch keeps the half-precision copies of weights until the
    # outermost context ends, so that the steps of the run would compute with those of its first one
    enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    caches = torch.is_autocast_cache_enabled()
    depth = 0
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        depth += 1
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)
        torch.set_autocast_cache_enabled(caches)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def _global_state_restored() -> Iterator[None]:
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] if _uses_cuda() else []
    rng = rng_state(gpus)
    current = torch.cuda.current_device() if gpus else None
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = dict(_cudnn_settings())
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch's module hides it
    try:
        yield
    finally:
        is_lost = has_lost_gpu()  # each call of CUDA would fail
        restore_rng(rng, [] if is_lost else gpus)
        if current is not None and not is_lost:
            torch.cuda.set_device(current)
        if _uses_cuda() and not is_lost:
            gc.collect()  # models and trainers refer to themselves, and hold the device's memory until then
            torch.cuda.empty_cache()
        torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports torch's compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        for name, value in cudnn.items():
            setattr(torch.backends.cudnn, name, value)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]  # as above


def _cudnn_settings() -> Iterator[tuple[str, bool]]:
    for name in ("deterministic", "benchmark", "allow_tf32"):
        try:
            value = getattr(torch.backends.cudnn, name)
        except RuntimeError:  # of the last, if the program has set parts of it by torch's newer API (fp32_precision)
            continue
        yield name, value


def _uses_cuda() -> bool:
    # asking an uninitialised CUDA for its state would initialise it
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's
