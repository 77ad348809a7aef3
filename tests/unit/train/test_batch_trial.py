"""One trial for `fit-batch`, in a process of its own, which reports to the command that started it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.resources import check_batch
from hpctrain.config.stored import to_yaml
from hpctrain.train.batch_trial import is_out_of_memory, trial_config
from tests.unit.greedy import WORDS

UNIT = Path(__file__).parents[1]
PLENTY = 64 << 30


@pytest.fixture
def tried(fork_server, tmp_path):
    """Tries a size of a configuration: the process, and what it reports."""

    def run(*words, size=1, limit_bytes=PLENTY):
        path = tmp_path / "config.yaml"
        path.write_text(to_yaml(Composer().compose([*WORDS, *words])))
        number = fork_server.start("tests.unit.greedy:trial", str(path), size, limit_bytes, folder=tmp_path)
        (done,) = fork_server.wait(number)
        return done, json.loads(done.result["printed"]) if done.result else None

    return run


def test_a_size_that_fits_is_measured(tried):
    done, found = tried("+task.mb=1", "trainer.cudnn_benchmark=true", size=2)
    assert (found["device"], found["fits"], found["num_samples"]) == ("cpu", True, 5000)
    assert found["samples_per_s"] > 0
    assert 1 << 20 < found["peak_bytes"] < found["limit_bytes"]
    printed = "printed by the task, with cudnn.benchmark True"
    assert printed in done.output, "but not to the command that reads the report"


def test_an_address_space_that_is_too_small_is_recognized(tried):
    _, found = tried("+task.mb=100", size=300, limit_bytes=16 << 30)
    assert found["fits"] is False
    assert "allocate memory" in found["message"]
    assert found["peak_bytes"] > 0
    assert "num_samples" not in found


def test_a_configuration_that_cannot_work_is_reported_with_its_exit_code(tried):
    _, found = tried("trainer.activation_checkpointing=[nowhere]")
    assert found["exit_code"] == 2
    assert "nowhere: matches no module" in found["error"]


def test_an_error_of_the_task_ends_the_process(tried):
    done, found = tried("+task.wrong=true")
    assert found is None
    assert "LookupError: the user's own" in done.output


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ([], 6),
        (["trainer.compile=true"], 6),
        (["trainer.compile=true", "trainer.compile_mode=reduce-overhead"], 3),
        (["trainer.compile=true", "trainer.compile_mode=max-autotune"], 3),
    ],
)
def test_a_trial_accumulates_if_the_run_can(words, size):
    trainer = trial_config(config := Composer().compose(words), 3, 5).trainer
    assert (trainer.micro_batch_size, trainer.global_batch_size, trainer.max_steps) == (3, size, 5)
    check_batch(trial_config(config, 3, 5), 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x6 and 5x3)"), False),
    ],
)
def test_messages_that_mean_too_large(error, expected):
    assert is_out_of_memory(error) == expected
