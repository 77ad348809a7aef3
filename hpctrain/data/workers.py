"""Processes that fetch batches beside the training."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpctrain.data.fetch import BatchFetcher, Request
from hpctrain.run.process import signals_blocked

_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_ALL = (*_IGNORED, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


def fetch_in_workers(
    fetcher: BatchFetcher,
    requests: Iterable[Request],
    *,
    num_workers: int,
    prefetch_factor: int,
    pin_memory: bool,
) -> Iterator[Any]:
    """Batches in the order of the requests, fetched ahead; the workers end when the iterator is dropped.

    Draws nothing from this process's random streams.

    Args:
        fetcher: turns a request (epoch, indices) into a batch.
        requests: may be endless.
        num_workers: at least 1; each computes on one thread.
        prefetch_factor: requests handed to every worker ahead of need.
        pin_memory: return tensors in page-locked memory; needs CUDA.
    """
    loader = DataLoader(
        fetcher,
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        collate_fn=_as_it_is,
        worker_init_fn=quiet_worker,
        generator=torch.Generator(),
        multiprocessing_context=_Fork() if multiprocessing.get_start_method() == "fork" else None,
    )
    with signals_blocked(_ALL):  # in the workers, until `quiet_worker` has run there
        return iter(loader)


class _Fork(multiprocessing.context.ForkContext):
    """Forks as Linux does by default, but a worker's death can't hold its rank.

    PyTorch tells its workers to end by an event, whose lock each of them takes for every batch: `Event.set` of the rank
    waits for ever where a worker was killed while it had the lock.
    """

    def Event(self) -> _Flag:  # type: ignore[override]  # noqa: N802  # PyTorch only sets and reads it
        return _Flag()


class _Flag:
    """One byte that a process and those forked from it share; once set it stays so."""

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def is_set(self) -> bool:
        return self._byte[0] == 1


def _as_it_is(batch: Any) -> Any:
    return batch


def quiet_worker(_worker_id: int) -> None:
    """Make a worker deaf to the signals that SLURM or a terminal sends to every process of a job.

    The rank stops at a step boundary and needs its workers until then. SIGTERM is obeyed from the worker's own rank
    only: that is how PyTorch and multiprocessing end a worker that is stuck. A worker dies with its rank: PyTorch's own
    watch leaves it 5 s, in which it keeps the rank's sockets open, and with them the port of the next attempt's store.
    """
    if sys.platform == "linux":  # prctl(2)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    rank = multiprocessing.parent_process()
    if rank is not None and rank.pid != os.getppid():
        os._exit(0)  # it died before; PyTorch would take whoever inherited this process for it, and wait for ever
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_obey_rank, name="sigterm", daemon=True).start()
    else:  # macOS
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _obey_rank() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
