"""DataLoader workers: how they are forked, hand over their batches, obey their rank, and die with it."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import multiprocessing
import multiprocessing.context
import multiprocessing.queues
import multiprocessing.util
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data import _utils as torch_data
from torch.utils.data._utils import pin_memory as torch_pinning
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.errors import HpctrainError, TaskError, error_text
from hpctrain.rank.agreement import LoadingStop
from hpctrain.run.process import signals_blocked

log = logging.getLogger("hpctrain.data")

FORK_TIMEOUT_S = 10.0
"""Seconds within which a forked worker must run; it takes milliseconds."""
MAX_SOCKET_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Longest TMPDIR in which a worker can make the socket by which it hands over batches: Linux allows 107 bytes for its
path (unix(7))."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
SHARED_MEMORY = "/dev/shm"
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (*_IGNORED, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
POLL_S = 0.5
"""Seconds between two checks for a stop, while a rank waits for its workers."""
END_S = 5.0
"""Seconds that all busy workers together get to end; PyTorch gives as many to each, one after another."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Settings by which batches are fetched.

    Attributes:
        num_workers: processes that fetch, each on one thread; with 0 this process fetches a batch when it is needed.
        prefetch_factor: batches that each worker fetches ahead.
        pin_memory: return tensors in page-locked memory; without CUDA it has no effect.
    """

    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False


IN_PROCESS = Workers()


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


class BatchQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # not generic when it runs
    """A queue that sends an error in place of a batch that it can't send.

    multiprocessing drops such a batch, and the rank would wait for it forever.

    Attributes:
        shortage: why this process couldn't receive a batch; empty if it could.
    """

    shortage = ""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Get a batch, or note why this process can't receive it."""
        try:
            return super().get(block, timeout)
        except Exception as error:
            self.shortage = describe_shortage(error)
            raise

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put a batch, or an error; one line in place of the traceback if collating lacked shared memory."""
        if isinstance(obj, tuple) and isinstance(obj[1], ExceptionWrapper) and "shared memory" in obj[1].exc_msg:
            shortage = describe_shortage(RuntimeError(obj[1].exc_msg))
            obj = (obj[0], _SendError(HpctrainError, shortage)) if shortage else obj
        super().put(obj, block, timeout)

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        if not isinstance(item, tuple):  # a batch that is pickled already: its rank has gone
            return
        text = f"{type(error).__name__}: {error_text(error)}"
        # pickle raises a PicklingError, a TypeError or an AttributeError, which all say so
        unpickled = "pickl" in text.lower()
        if unpickled:
            message = (
                f"expected batches that Python can pickle, to send them from a DataLoader worker, got {text}; return "
                "tensors, arrays, numbers and texts from dataset and collate_fn, or set data.num_workers=0"
            )
        else:
            message = describe_shortage(error) or (
                f"a DataLoader worker can't send a batch to its rank: {text}; with data.num_workers=0 the rank fetches "
                "batches itself"
            )
        self.put((item[0], _SendError(TaskError if unpickled else HpctrainError, message)))


class _SendError(ExceptionWrapper):
    """An error in place of a batch, without the traceback of the worker's feeding thread."""

    def __init__(self, kind: type[HpctrainError], message: str) -> None:
        self._kind = kind
        self.exc_msg = message

    def reraise(self) -> NoReturn:
        """Raise the error in the rank."""
        raise self._kind(self.exc_msg)


class _Context:
    """Mixin for Python's contexts: a queue that reports what it can't send."""

    def Queue(self, maxsize: int = 0) -> BatchQueue:  # noqa: N802  # multiprocessing's name
        return BatchQueue(maxsize, ctx=self)


class _Fork(_Context, multiprocessing.context.ForkContext):
    """Forks like Linux's default context, but neither a worker's start nor its death can block its rank.

    PyTorch ends its workers through an event, whose lock each of them takes for every batch. If a worker is killed
    while it holds the lock, the rank's `Event.set` waits forever.
    """

    Process = _Worker

    def Event(self) -> _Flag:  # type: ignore[override]  # noqa: N802  # PyTorch only sets and reads it
        return _Flag()


class _Spawn(_Context, multiprocessing.context.SpawnContext):
    """Spawns as Python's own context."""


class _ForkServer(_Context, multiprocessing.context.ForkServerContext):
    """Asks a server to fork as Python's own context."""


CONTEXTS: Mapping[str, type[multiprocessing.context.BaseContext]] = MappingProxyType(
    {"fork": _Fork, "spawn": _Spawn, "forkserver": _ForkServer}
)


def start_method() -> str:
    """Return how workers are started: as the program has chosen, and by a fork where Python's default applies.

    The default of Python 3.14, the forkserver, pickles the dataset and imports torch in each worker, which sees nothing
    of what the rank has read. Python doesn't record whether a program has chosen the default, so there an explicit
    forkserver becomes a fork, too.
    """
    python_default = multiprocessing.get_all_start_methods()[0]
    method = multiprocessing.get_start_method(allow_none=True)
    return "fork" if method in (None, python_default) else method


class _Flag:
    """One byte that a process shares with the processes forked from it; once set it stays set."""

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def is_set(self) -> bool:
        return self._byte[0] == 1


def describe_shortage(error: Exception) -> str:
    """Describe what the system lacks to send a batch, and the remedy; empty for any other error."""
    number, text = getattr(error, "errno", None), error_text(error)
    if "AF_UNIX path too long" in text:
        folder = tempfile.gettempdir()
        return (
            f"a DataLoader worker can't make a socket in {folder}: its path has {len(os.fsencode(folder))} bytes, and "
            f"at most {MAX_SOCKET_FOLDER_BYTES} fit; set TMPDIR to a shorter path, such as /tmp"
        )
    # "received 0 items of ancdata": the kernel has dropped a descriptor for which there was no room
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text or "items of ancdata" in text:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"the batches of the DataLoader workers need more than {limit} open files, the limit of a process: raise "
            "the hard limit (ulimit -Hn), lower data.num_workers or data.prefetch_factor, or have collate_fn return "
            "fewer tensors"
        )
    if number == errno.ENOSPC or "No space left on device" in text:
        disk = shutil.disk_usage(SHARED_MEMORY)
        return (
            f"a batch of a DataLoader worker doesn't fit into shared memory: {SHARED_MEMORY} has "
            f"{disk.total / 1e6:.0f} MB, of which {disk.free / 1e6:.0f} MB are free now; enlarge it (in a container, "
            "--shm-size), or lower data.num_workers or data.prefetch_factor"
        )
    return ""


def init_worker(_worker_id: int) -> None:
    """Make a worker ignore the signals that SLURM or a terminal sends to every process of a job, and die with its rank.

    The rank stops after a step and needs its workers until then. They obey SIGTERM only if their own rank sends it,
    since PyTorch and multiprocessing use it to end a stuck worker.
    """
    # prctl(2). PyTorch's own check leaves an orphan 5 s, in which it keeps the rank's sockets open, and with them the
    # port of the next attempt's store.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    rank = multiprocessing.parent_process()
    if start_method() == "forkserver":
        # its parent is the server, which lives as long as it does
        threading.Thread(target=_end_with_rank, name="rank", daemon=True).start()
    elif rank is not None and rank.pid != os.getppid():
        # the rank died before prctl; PyTorch would mistake the adoptive parent for the rank, and wait forever
        os._exit(0)
    info = get_worker_info()
    if info is not None and getattr(info.dataset, "streams", False):
        # a stream that finds other workers splits itself, but each of them has to read all of it
        torch_worker._worker_info = None
    _shorten_socket_folder()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_obey_rank, name="sigterm", daemon=True).start()


def _shorten_socket_folder() -> None:
    """Make multiprocessing's folder for sockets elsewhere, if TMPDIR is too long for it. Python 3.14 does so itself."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= MAX_SOCKET_FOLDER_BYTES:
        return
    for folder in SHORT_FOLDERS:
        if os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            try:
                multiprocessing.util.get_temp_dir()
            finally:
                tempfile.tempdir = usual
            return


def _obey_rank() -> None:
    rank = multiprocessing.parent_process()
    rank_pid = os.getppid() if rank is None else rank.pid
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank_pid:
        pass
    os._exit(0)


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(0)


@dataclass(frozen=True, slots=True)
class BatchToPin:
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


def load_in_workers(
    dataset: Dataset[Any], requests: Iterable[Any], workers: Workers, loading: LoadingStop | None, *, pin_memory: bool
) -> Iterator[Any]:
    """Yield batches in the order of the requests; the workers end when the iterator is dropped.

    Args:
        dataset: returns a batch for a request; with an attribute `streams` that is true, it reads streams.
        requests: may be endless.
        workers: at least one.
        loading: stops the ranks while they wait for a batch; None: nothing stops them.
        pin_memory: return tensors in page-locked memory.

    Raises:
        StopWhileLoading: the ranks stop.
        HpctrainError: a worker can't send its batches to this process.
        TaskError: a batch can't be sent, because Python can't pickle it.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=requests,
        num_workers=workers.num_workers,
        prefetch_factor=workers.prefetch_factor,
        pin_memory=pin_memory,
        collate_fn=BatchToPin if pin_memory else _unchanged,
        worker_init_fn=init_worker,
        generator=torch.Generator(),
        multiprocessing_context=CONTEXTS[start_method()](),
    )
    loader.check_worker_number_rationality()
    with signals_blocked(SIGNALS):  # in the workers, until `init_worker` has run there
        return _Batches(loader, loading)


class _Batches(_MultiProcessingDataLoaderIter):
    """Fetches as PyTorch's class does; a stop ends the wait for a batch."""

    def __init__(self, loader: DataLoader[Any], loading: LoadingStop | None) -> None:
        self._loading = loading
        super().__init__(loader)

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except Exception as error:
            # the pinning thread prints its own error, and PyTorch only reports that the thread has ended
            batches = self._worker_result_queue
            assert isinstance(batches, BatchQueue)
            if shortage := describe_shortage(error) or batches.shortage:
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
        # A kill rarely leaves a file in /dev/shm, of a batch's size: a worker unlinks its files microseconds after
        # making them. Telling such files from those in use, to remove them, would take about 90 lines.
        for worker in self._workers:
            worker.kill()


def _unchanged(batch: Any) -> Any:
    return batch
