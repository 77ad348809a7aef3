from __future__ import annotations

import pytest
import torch

from hpctrain.config.compose import Composer
from hpctrain.rank.classification import advice
from hpctrain.tasks import Task

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.31 GiB is free."
)
CPU = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
ON_GPU = (
    (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
SMALLER = "memory: set trainer.micro_batch_size below 32 (`python -m hpctrain fit-batch` finds the largest)"
WORKER = "DataLoader worker (pid 812) is killed by signal: Killed. "
DDP = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable"
)
BATCH_NORM = "Expected more than 1 value per channel when training"
SINGLE = "batch norm can't compute the variance of the single sample in this micro-batch"
CHECKPOINT = "set trainer.activation_checkpointing"
FIT = "(`python -m hpctrain fit-batch` finds the largest)"


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("words", "error", "expected"),
    [
        (
            [],
            OutOfMemoryError(CUDA),
            f"out of GPU memory: set trainer.micro_batch_size below 32 {FIT}, {CHECKPOINT}, or use precision=bf16",
        ),
        (
            ["trainer.micro_batch_size=8", "trainer.activation_checkpointing=['*']", "precision=bf16"],
            OutOfMemoryError(CUDA),
            f"out of GPU memory: set trainer.micro_batch_size below 8 {FIT}",
        ),
        *(
            (["precision=bf16", "trainer.activation_checkpointing=['*']"], RuntimeError(text), f"out of GPU {SMALLER}")
            for text in ON_GPU
        ),
        # without accumulation, a smaller micro-batch needs another mode of the compiler
        (
            ["trainer.compile=true", "trainer.compile_mode=reduce-overhead"],
            OutOfMemoryError(CUDA),
            "out of GPU memory: set trainer.compile_mode=default and trainer.micro_batch_size below 32",
        ),
        *(
            (words, ValueError(f"{BATCH_NORM}, got input size torch.Size([1, 8])"), expected)
            for words, expected in [
                (
                    [],
                    f"{SINGLE}, which the last step of an epoch may have: set data.drop_last=true, which leaves that s",
                ),
                (["trainer.micro_batch_size=1"], f"{SINGLE}: set trainer.micro_batch_size above 1"),
            ]
        ),
        # a micro-batch of one sample can't be smaller
        (
            ["trainer.micro_batch_size=1", "precision=bf16"],
            OutOfMemoryError(CUDA),
            "out of GPU memory: set trainer.act",
        ),
        (
            ["trainer.micro_batch_size=1", "trainer.activation_checkpointing=['*']", "precision=bf16"],
            OutOfMemoryError(CUDA),
            "",
        ),
        (
            ["cluster=slurm", "cluster.memory_gb=2"],
            RuntimeError(CPU),
            "out of memory: raise cluster.memory_gb above 2 (GB per",
        ),
        (["cluster=slurm"], MemoryError(), "out of memory: set cluster.memory_gb (it is unset, so"),
        ([], MemoryError(), "out of memory: use a smaller data.num_workers, or use a smaller trainer.micro_batch_size"),
        (["data.num_workers=0", "trainer.micro_batch_size=1"], MemoryError(), "out of memory: use a smaller model"),
        # the launcher, which finds out why, gives the advice
        ([], RuntimeError(WORKER), ""),
        (
            [],
            RuntimeError(DDP),
            "some parameters did not contribute to the loss: set parallel.find_unused_parameters=true in a new run",
        ),
        (["parallel.find_unused_parameters=true"], RuntimeError(DDP), ""),
        ([], ValueError("the user's own"), ""),
    ],
)
def test_an_error_that_a_key_prevents(words: list[str], error: BaseException, expected: str) -> None:
    found = advice(error, Composer().compose(words), world_size=2)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


class Own(Task):
    def train_dataset(self): ...

    def advised(self, what):
        try:
            what(self)
        except Exception as error:
            return advice(error, Composer().compose([]), world_size=1)


def backward_twice(_: Own) -> None:
    loss = torch.ones(2, requires_grad=True).square().sum()
    loss.backward()
    loss.backward()


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (lambda task: task.log("acc", 1.0), "call self.log.scalar(name, value)"),
        (lambda task: task.log.log_dict({"acc": 1.0}), "call self.log.scalar(name, value)"),
        (lambda task: task.current_epoch, "use self.position.epoch"),
        (lambda task: torch.ones(2).current_epoch, ""),
        (lambda task: task.another, ""),
        (backward_twice, "a loss must not call backward()"),
    ],
)
def test_an_error_that_a_change_of_the_task_prevents(mistake, expected):
    found = Own().advised(mistake)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
