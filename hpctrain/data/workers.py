"""Fetch batches, in this process or in DataLoader workers."""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info
from torch.utils.data._utils import pin_memory as torch_pinning
from torch.utils.data._utils import worker as torch_worker

from hpctrain.data.dataset import BatchDataset
from hpctrain.data.fetch import BatchFetcher, Request, without_subsets
from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.data.stream import is_stream
from hpctrain.run.process import signals_blocked

log = logging.getLogger("hpctrain.data")

MAX_WORKERS = 8
"""Most workers by default: more rarely feed a rank faster, and each takes memory."""
CPU_SHARE = 4
"""Cores per worker on a CPU: the other cores compute."""
FORK_TIMEOUT_S = 10.0
"""Seconds within which a forked worker must run; it takes milliseconds."""

_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ALL = (*_IGNORED, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Workers:
    """How batches are fetched.

    Attributes:
        num_workers: processes that fetch, each on one thread; with 0 this process fetches a batch when it is needed.
        prefetch_factor: batches that each worker fetches ahead.
        pin_memory: return tensors in page-locked memory; without CUDA it has no effect.
    """

    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False


IN_PROCESS = Workers()


def default_num_workers(dataset: Dataset[Any], cores: int, *, on_gpu: bool) -> int:
    """Default number of DataLoader workers.

    Args:
        dataset: of the task.
        cores: the rank's share of the CPU cores.
        on_gpu: whether the rank computes on a GPU; one core drives it.
    """
    if not workers_can_help(dataset):
        return 0
    return min(MAX_WORKERS, cores - 1 if on_gpu else cores // CPU_SHARE)


def workers_can_help(dataset: Dataset[Any]) -> bool:
    """Return whether DataLoader workers can fetch the samples faster than the rank itself.

    They can't if whole batches come from memory, since sending one takes longer than making it. Nor can they for a
    stream, since each worker would read all of it.
    """
    inner: Any = without_subsets(dataset)
    in_batches = isinstance(inner, BatchDataset | TensorDataset) and not getattr(inner, "draws_per_sample", False)
    return not in_batches and not is_stream(inner)


def fetch_batches(fetcher: BatchFetcher, requests: Iterable[Request], workers: Workers) -> Iterator[Any]:
    """Yield batches in the order of the requests; the workers end when the iterator is dropped.

    Draws nothing from this process's random generators.

    Args:
        fetcher: turns a request (epoch, indices) into a batch.
        requests: may be endless.
        workers: how batches are fetched.
    """
    pin_memory = workers.pin_memory and torch.cuda.is_available()
    if not workers.num_workers:
        return _fetch_here(fetcher, requests, pin_memory=pin_memory)
    loader = DataLoader(
        fetcher,
        batch_size=None,
        sampler=requests,
        num_workers=workers.num_workers,
        prefetch_factor=workers.prefetch_factor,
        pin_memory=pin_memory,
        collate_fn=_BatchToPin if pin_memory else _unchanged,
        worker_init_fn=init_worker,
        generator=torch.Generator(),
        multiprocessing_context=_Fork() if multiprocessing.get_start_method() == "fork" else None,
    )
    with signals_blocked(_ALL):  # in the workers, until `init_worker` has run there
        return iter(loader)


def _fetch_here(fetcher: BatchFetcher, requests: Iterable[Request], *, pin_memory: bool) -> Iterator[Any]:
    for request in requests:
        batch = fetcher[request]
        yield _BatchToPin(batch).pin_memory() if pin_memory else batch


@dataclass(frozen=True, slots=True)
class _BatchToPin:
    """A batch on its way to DataLoader's pinning thread, which calls `pin_memory` where an object has it.

    Left to itself, the thread doesn't descend into dataclasses (torch/utils/data/_utils/pin_memory.py of torch 2.13).
    """

    batch: Any

    def pin_memory(self) -> Any:
        """Return the batch, unwrapped, with its tensors in page-locked memory."""
        # torch first: it also pins objects of other classes that have a `pin_memory`, wherever it finds them
        batch = torch_pinning.pin_memory(self.batch)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if all(tensor.is_pinned() for tensor in iterate_tensors(batch)):
            return batch
        return map_tensors(torch.Tensor.pin_memory, batch)


class _Worker(multiprocessing.context.ForkProcess):
    """A forked process. If it hangs right after the fork, it is killed, and forked again.

    In CPython 3.11 before 3.11.10 (gh-112275), the child needs a lock that another thread may have held at the fork,
    and then waits forever. Gloo's threads take the lock without the GIL to release the tensors of a collective.
    """

    _runs: Semaphore

    def run(self) -> None:
        self._runs.release()
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:  # noqa: N802  # multiprocessing's name for what starts the process
        assert isinstance(process_obj, _Worker)
        while True:
            # one for each child: a child that is only slow may release its own just before it is killed
            process_obj._runs = Semaphore(0, ctx=multiprocessing.get_context("fork"))
            child = Popen(process_obj)
            if process_obj._runs.acquire(timeout=FORK_TIMEOUT_S):
                return child
            log.warning("a DataLoader worker didn't run within %g s of its fork; it is forked again", FORK_TIMEOUT_S)
            child.kill()  # if the rank dies before this line, a child that hangs outlives it
            child.wait()
            child.close()


class _Fork(multiprocessing.context.ForkContext):
    """Forks like Linux's default context, but neither a worker's start nor its death can block its rank.

    PyTorch ends its workers through an event, whose lock each of them takes for every batch. If a worker is killed
    while it holds the lock, the rank's `Event.set` waits forever.
    """

    Process = _Worker

    def Event(self) -> _Flag:  # type: ignore[override]  # noqa: N802  # PyTorch only sets and reads it
        return _Flag()


class _Flag:
    """One byte that a process shares with the processes forked from it; once set it stays set."""

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def is_set(self) -> bool:
        return self._byte[0] == 1


def _unchanged(batch: Any) -> Any:
    return batch


def init_worker(_worker_id: int) -> None:
    """Make a worker ignore the signals that SLURM or a terminal sends to every process of a job, and die with its rank.

    The rank stops after a step and needs its workers until then. They obey SIGTERM only if their own rank sends it,
    since PyTorch and multiprocessing use it to end a stuck worker.
    """
    if sys.platform == "linux":
        # prctl(2). PyTorch's own check leaves an orphan 5 s, in which it keeps the rank's sockets open, and with them
        # the port of the next attempt's store.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    rank = multiprocessing.parent_process()
    if rank is not None and rank.pid != os.getppid():
        # the rank died before prctl; PyTorch would mistake the adoptive parent for the rank, and wait forever
        os._exit(0)
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, BatchFetcher) and info.dataset.streams:
        # a stream that finds other workers splits itself, but each of them has to read all of it
        torch_worker._worker_info = None
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
