"""Loading processes of a rank that computes on a GPU: forked after CUDA has started, and gone at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hpctrain.data.fetch import BatchFetcher, fetch_batches
from hpctrain.data.workers import Workers

pytestmark = pytest.mark.gpu
EPOCHS = 3
WORDS = (
    "task=custom",
    "task._target_=tests.gpu.programs.gpu_tasks.Pictures",
    "+task.num_samples=64",
    "+task.noise=true",
    "trainer.global_batch_size=16",
    "trainer.max_steps=null",
    f"trainer.max_epochs={EPOCHS}",
    "trainer.deterministic=true",
    "data.pin_memory=true",
)


@pytest.fixture(scope="module")
def ended(shells, at_once):
    """A run with two loading processes, and one without any; each with the processes that have made samples."""

    def train(num_workers):
        shell = shells(num_workers)
        folder = shell.folder / "loaded_by"
        folder.mkdir()
        process = shell.start_training(*WORDS, f"data.num_workers={num_workers}", LOADED_BY=str(folder))
        shell.wait(process)
        return shell, process.pid, {int(path.name) for path in folder.iterdir()}

    counts = [2, 0]
    return dict(zip(counts, at_once(train, counts), strict=True))


@pytest.mark.core
def test_loading_processes_make_all_samples_of_three_epochs_and_end_with_the_run(ended):
    shell, rank, loaded_by = ended[2]
    assert len(loaded_by) == 2
    assert rank not in loaded_by
    assert not any(runs(pid) for pid in (rank, *loaded_by))
    assert shell.processes == []
    assert shell.inspected["step"] == EPOCHS * 64 // 16
    assert str(shell.attempts[-1].reason) == "completed"


def test_the_weights_do_not_depend_on_who_loads(ended):
    (two, *_), (none, rank, loaded_by) = ended[2], ended[0]
    assert loaded_by == {rank}
    assert two.digest == none.digest
    assert two.metrics == none.metrics


def test_loading_processes_die_with_a_rank_that_is_killed(shell, wait_until):
    folder = shell.folder / "loaded_by"
    folder.mkdir()
    acts = {"TRIAL_ACT": "0:6:SIGKILL", "LOADED_BY": str(folder)}
    shell.train(*WORDS, "data.num_workers=2", code=-9, **acts)
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == 2
    # the kernel kills them when their parent has ended, and takes a moment to release page-locked memory
    wait_until(lambda: not any(runs(pid) for pid in pids), timeout_s=10)


@pytest.mark.needs_cuda("page-locked memory")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_tensors_of_dataclasses_are_page_locked_too(num_workers):
    fetcher = BatchFetcher(TensorDataset(torch.arange(8)), 0, Pair.of)
    requests = [(0, np.array([index])) for index in range(3)]
    batches = list(fetch_batches(fetcher, requests, Workers(num_workers, pin_memory=True)))
    assert [pair.left.tolist() for _, pair in batches] == [[0], [1], [2]]
    assert all(index.is_pinned() and pair.left.is_pinned() and pair.right.is_pinned() for index, pair in batches)


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor

    @classmethod
    def of(cls, samples):
        index = torch.stack([sample for (sample,) in samples])
        return index, cls(index.clone(), index + 1)


def runs(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
