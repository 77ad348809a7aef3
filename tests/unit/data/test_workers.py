from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hpctrain.data.fetch import BatchFetcher, TensorBatches, default_num_workers, fetch_batches
from hpctrain.data.workers import MAX_SOCKET_FOLDER_BYTES, Workers, init_worker
from hpctrain.errors import HpctrainError, TaskError


def be_stuck(ready: Event) -> None:
    init_worker(0)
    ready.set()
    time.sleep(60)


def test_a_stuck_worker_obeys_its_own_rank_only() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=be_stuck, args=(ready,))
    worker.start()
    assert ready.wait(20)
    for name in ("INT", "USR1", "USR2", "TERM"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    worker.join(0.3)
    assert worker.is_alive()
    assert worker.pid is not None
    os.kill(worker.pid, 15)
    worker.join(20)
    assert worker.exitcode == 0


def lose_the_rank_at_once(place: Path) -> None:
    rank = os.getppid()
    (place / "new").write_text(str(os.getpid()))
    (place / "new").rename(place / "worker")
    while os.getppid() == rank:
        time.sleep(0.001)
    init_worker(0)
    (place / "lives on").touch()
    time.sleep(60)


def be_killed(place: Path) -> None:
    multiprocessing.get_context("fork").Process(target=lose_the_rank_at_once, args=(place,)).start()
    while not (place / "worker").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_whose_rank_died_before_it_began_exits(tmp_path: Path) -> None:
    """PyTorch's own check would take the process that adopted the worker for its rank."""
    rank = multiprocessing.get_context("fork").Process(target=be_killed, args=(tmp_path,))
    rank.start()
    rank.join(20)
    worker = int((tmp_path / "worker").read_text())
    give_up = time.monotonic() + 20
    while running(worker):
        assert not (tmp_path / "lives on").exists()
        assert time.monotonic() < give_up
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def fetch_with_a_fork_that_hangs(place: Path) -> None:
    forks: list[int] = []

    def hang_in_the_first_child() -> None:
        if len(forks) == 1:
            (place / "hung").write_text(str(os.getpid()))
            time.sleep(60)

    os.register_at_fork(before=lambda: forks.append(1), after_in_child=hang_in_the_first_child)
    requests = [(0, numpy.array([index])) for index in range(8)]
    batches = list(fetch_batches(BatchFetcher(Plain(), 0, tuple), requests, Workers(2)))
    (place / "batches").write_text(str(batches))


def test_a_worker_that_hangs_in_its_fork_is_forked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython before 3.11.10 hangs if another thread of the rank creates a Python thread state at that moment."""
    monkeypatch.setattr("hpctrain.data.workers.FORK_TIMEOUT_S", 0.5)
    rank = multiprocessing.get_context("fork").Process(target=fetch_with_a_fork_that_hangs, args=(tmp_path,))
    rank.start()
    rank.join(20)
    assert (tmp_path / "batches").read_text() == str([(index,) for index in range(8)])
    assert not running(int((tmp_path / "hung").read_text()))


DIE_WITH_LOCKS = """
import gc, os, signal, sys
from multiprocessing.synchronize import SemLock
import numpy
import torch
from hpctrain.data.fetch import BatchFetcher, fetch_batches
from hpctrain.data.workers import Workers

class Deadly(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 10:
            for lock in [found for found in gc.get_objects() if isinstance(found, SemLock)]:
                lock.acquire(False)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)

fetcher = BatchFetcher(Deadly(), 0, None)
batches = fetch_batches(fetcher, [(0, numpy.array([index])) for index in range(100)], Workers(1))
try:
    for batch in batches:
        pass
except RuntimeError as error:
    print(str(error).partition("(")[0], flush=True)
del batches
print("continued")
"""


def test_a_worker_that_dies_with_all_its_locks_does_not_block_its_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIE_WITH_LOCKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "DataLoader worker \ncontinued\n", done.stderr


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Pairs(Dataset):
    """Whose batches hold their tensors in a dataclass, in a list, and in an object that knows how to pin itself."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), index)

    @staticmethod
    def collate(samples):
        (sample,) = samples
        return {"pair": Pair(sample, sample + 1), "list": [sample, "name"], "packed": Packed(sample)}


@dataclass
class Packed:
    value: torch.Tensor

    def pin_memory(self):
        return Packed(self.value.pin_memory())


@pytest.fixture
def pinned(monkeypatch):
    """A device that can pin, for this process: the tensors that it has pinned."""
    tensors = []

    def pin(tensor):
        if tensor.is_pinned():
            return tensor
        tensors.append(tensor.clone())
        return tensors[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in (
        ("is_available", True),
        ("current_accelerator", torch.device("cuda")),
        ("current_device_index", 0),
        ("set_device_index", None),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is each for each in tensors))
    return tensors


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_tensors_of_dataclasses_are_pinned_too(pinned, num_workers):
    """torch's DataLoader leaves them out."""
    requests = [(0, numpy.array([index])) for index in range(3)]
    fetcher = BatchFetcher(Pairs(), 0, Pairs.collate)
    batches = list(fetch_batches(fetcher, requests, Workers(num_workers, pin_memory=True)))
    for index, batch in enumerate(batches):
        tensors = [batch["pair"].left, batch["list"][0], batch["packed"].value, batch["pair"].right]
        assert [tensor.tolist() for tensor in tensors] == [[index] * 2] * 3 + [[index + 1] * 2]
        assert all(tensor.is_pinned() for tensor in tensors)
        assert batch["list"][1] == "name"
    assert len(pinned) == 4 * len(batches), "each once"


class Plain(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Drawing(TensorBatches):
    draws_per_sample = True


@pytest.mark.parametrize("dataset", [TensorBatches(torch.arange(8)), TensorDataset(torch.arange(8)), Stream()])
def test_data_in_memory_and_streams_get_no_workers_by_default(dataset):
    assert default_num_workers(dataset, 16, on_gpu=True) == 0
    if not isinstance(dataset, IterableDataset):
        assert default_num_workers(Subset(dataset, [1, 2]), 16, on_gpu=True) == 0


@pytest.mark.parametrize("dataset", [Plain(), Drawing(torch.arange(8)), Subset(Plain(), [1])])
@pytest.mark.parametrize(
    ("cores", "on_gpu", "workers"),
    [(1, True, 0), (4, True, 3), (64, True, 8), (2, False, 0), (8, False, 2), (64, False, 8)],
)
def test_the_default_number_of_workers_follows_the_cores_of_the_rank(dataset, cores, on_gpu, workers):
    assert default_num_workers(dataset, cores, on_gpu=on_gpu) == workers


class Unsent:
    """Can't be pickled, for this reason."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Odd(Dataset):
    """Whose second sample is this."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 1 and isinstance(self.sample, type):
            raise self.sample
        return self.sample if index == 1 else torch.tensor(index)


class LocalError:
    class Error(ValueError):
        pass


LocalError.Error.__qualname__ = "elsewhere"


@pytest.mark.parametrize(
    ("sample", "kind", "problem"),
    [
        (lambda: 0, TaskError, r"^expected batches that Python can pickle, .*lambda.*set data\.num_workers=0$"),
        (LocalError.Error, TaskError, "^expected batches that Python can pickle"),
        (
            Unsent(OSError("AF_UNIX path too long")),
            HpctrainError,
            r"has \d+ bytes, and at most 75 fit; set TMPDIR to",
        ),
        (Unsent(OSError(errno.EMFILE, "")), HpctrainError, r"need more than \d+ open files.*ulimit -Hn"),
        (Unsent(RuntimeError("No space left on device (28)")), HpctrainError, "MB are free now; enlarge it"),
        (Unsent(RuntimeError("error executing torch_shm_manager")), HpctrainError, "torch_shm_manager; with data.num_"),
    ],
)
def test_a_batch_that_a_worker_cannot_send_is_an_error_in_one_line(sample, kind, problem):
    """multiprocessing drops such a batch, for which the rank would wait forever."""
    batches = fetch_batches(BatchFetcher(Odd(sample), 0, tuple), [(0, numpy.array([n])) for n in range(3)], Workers(1))
    assert next(batches) == (0,)
    with pytest.raises(kind, match=problem) as raised:
        next(batches)
    assert "\n" not in str(raised.value)


def test_workers_hand_over_their_batches_though_tmpdir_is_too_long_for_a_socket(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * (MAX_SOCKET_FOLDER_BYTES // 4))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    # the fork server of other tests has made one, which workers would inherit
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    fetcher, requests = BatchFetcher(Drawing(torch.arange(8)), 0), [(0, numpy.array([index])) for index in range(3)]
    assert [batch[0].item() for batch in fetch_batches(fetcher, requests, Workers(1))] == [0, 1, 2]
    monkeypatch.setattr("hpctrain.data.workers.SHORT_FOLDERS", ())
    python_does_so = sys.version_info >= (3, 14)
    refused = pytest.raises(HpctrainError, match=f"its path has {len(str(folder))} bytes")
    with contextlib.nullcontext() if python_does_so else refused:
        next(fetch_batches(fetcher, requests, Workers(1)))


class Wide(Plain):
    """With samples of many tensors."""

    def __getitem__(self, index):
        return [torch.tensor(index) for _ in range(60)]


def fetch_with_few_files(place: Path, in_workers: bool, pin: bool) -> None:
    used = len([*Path("/proc/self/fd").iterdir()])
    limit = used + (40 if in_workers else 90)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        requests = [(0, numpy.array([n])) for n in range(8)]
        list(fetch_batches(BatchFetcher(Wide(), 0), requests, Workers(2, pin_memory=pin)))
    except HpctrainError as error:
        (place / "error").write_text(str(error))


@pytest.mark.parametrize(("in_workers", "pin"), [(True, False), (False, False), (False, True)])
def test_workers_that_run_out_of_open_files_are_an_error(tmp_path: Path, pinned, in_workers: bool, pin: bool) -> None:
    rank = multiprocessing.get_context("fork").Process(target=fetch_with_few_files, args=(tmp_path, in_workers, pin))
    rank.start()
    rank.join(20)
    assert "open files, the limit of a process" in (tmp_path / "error").read_text()


@pytest.mark.parametrize(("line", "method"), [("Lock()", "fork"), ("set_start_method('spawn')", "spawn")])
def test_workers_are_forked_unless_the_program_chose_otherwise(line, method):
    """From Python 3.14 on, a lock alone makes the forkserver the method of the process."""
    code = f"import multiprocessing as m; m.{line}; from hpctrain.data.workers import start_method as f; print(f())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == method
