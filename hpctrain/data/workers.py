"""Fetch batches, in this process or in DataLoader workers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.queues
import multiprocessing.util
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data import _utils as torch_data
from torch.utils.data._utils import pin_memory as torch_pinning
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hpctrain.data.dataset import BatchDataset
from hpctrain.data.fetch import BatchFetcher, Request, without_subsets
from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.data.stream import is_stream
from hpctrain.data.worker_process import CONTEXTS, SIGNALS, BatchQueue, init_worker, shortage_of
from hpctrain.errors import HpctrainError
from hpctrain.rank.agreement import LoadingStop
from hpctrain.run.process import signals_blocked

MAX_WORKERS = 8
"""Most workers by default: more rarely feed a rank faster, and each takes memory."""
CPU_SHARE = 4
"""Cores per worker on a CPU: the other cores compute."""
POLL_S = 0.5
"""Seconds between two checks for a stop, while a rank waits for its workers."""
END_S = 5.0
"""Seconds that all busy workers together get to end; PyTorch gives as many to each, one after another."""


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


def fetch_batches(
    fetcher: BatchFetcher, requests: Iterable[Request], workers: Workers, loading: LoadingStop | None = None
) -> Iterator[Any]:
    """Yield batches in the order of the requests; the workers end when the iterator is dropped.

    Draws nothing from this process's random generators.

    Args:
        fetcher: turns a request (epoch, indices) into a batch.
        requests: may be endless.
        workers: how batches are fetched.
        loading: stops the ranks while they wait for a batch; None: nothing stops them.

    Raises:
        StopWhileLoading: the ranks stop.
        HpctrainError: a worker can't send its batches to this process.
        TaskError: a batch can't be sent, because Python can't pickle it.
    """
    pin_memory = workers.pin_memory and torch.cuda.is_available()
    if not workers.num_workers:
        return _fetch_here(fetcher, requests, loading, pin_memory=pin_memory)
    loader = _Loader(
        fetcher,
        batch_size=None,
        sampler=requests,
        num_workers=workers.num_workers,
        prefetch_factor=workers.prefetch_factor,
        pin_memory=pin_memory,
        collate_fn=_BatchToPin if pin_memory else _unchanged,
        worker_init_fn=init_worker,
        generator=torch.Generator(),
        multiprocessing_context=CONTEXTS[multiprocessing.get_start_method()](),
    )
    loader.loading = loading
    with signals_blocked(SIGNALS):  # in the workers, until `init_worker` has run there
        return iter(loader)


def _fetch_here(
    fetcher: BatchFetcher, requests: Iterable[Request], loading: LoadingStop | None, *, pin_memory: bool
) -> Iterator[Any]:
    for request in requests:
        if loading is not None and loading.interrupts:
            batch = loading.fetch(fetcher.__getitem__, request)
        else:
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


class _Loader(DataLoader[Any]):
    """Loads as PyTorch's class does; a stop ends the wait for a batch."""

    loading: LoadingStop | None

    def _get_iterator(self) -> _MultiProcessingDataLoaderIter:
        self.check_worker_number_rationality()
        return _Batches(self)


class _Batches(_MultiProcessingDataLoaderIter):
    """The batches of a `_Loader`."""

    def __init__(self, loader: _Loader) -> None:
        self._loading = loader.loading
        super().__init__(loader)

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except Exception as error:
            # the pinning thread prints its own error, and PyTorch only reports that the thread has ended
            batches = self._worker_result_queue
            assert isinstance(batches, BatchQueue)
            if shortage := shortage_of(error) or batches.shortage:
                raise HpctrainError(shortage) from error
            raise

    def _try_get_data(self, timeout: float = POLL_S) -> tuple[bool, Any]:
        success, batch = super()._try_get_data(timeout)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if not success and self._loading is not None:
            self._loading.poll()
        return success, batch

    def _shutdown_workers(self) -> None:
        # python_exit_status: during Python's own end PyTorch does nothing here, and no thread can be started
        if self._shutdown or torch_data.python_exit_status is not False:
            return super()._shutdown_workers()
        # or PyTorch would report the kills as errors of the workers
        torch._C._remove_worker_pids(id(self))
        self._worker_pids_set = False
        killer = threading.Timer(END_S, self._kill_workers)
        killer.daemon = True
        killer.start()
        try:
            super()._shutdown_workers()
        finally:
            killer.cancel()

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()


def _unchanged(batch: Any) -> Any:
    return batch
