"""Errors of the task on the GPU: the attempt fails, for the right reason, with the rank at fault and advice."""

from __future__ import annotations

import socket

import pytest

from hpctrain.errors import ExitCode
from tests.gpu.programs.gpu_tasks import FEW_STEPS, ON_CPU
from tests.multiprocess.programs.trial import CLASSES

pytestmark = [pytest.mark.gpu, pytest.mark.apart]
TIMES = 20
WORDS = FEW_STEPS
TWO = ("cluster.processes_per_node=2", "parallel.backend=gloo")
FAULT = "device-side assert triggered"
NO_CLASS = f"Target {CLASSES} is out of bounds" if ON_CPU else FAULT
"""What cross_entropy raises for a label that is too large."""


def test_a_fault_on_the_device_fails_with_an_exit_record_every_time(shells, at_once):
    """Step 3 computes on a GPU that answers nothing from then on, while a save is being written."""

    def train(number):
        shell = shells(number)
        shell.train(*WORDS, code=ExitCode.FAILED, TRIAL_ACT="0:3:fault")
        (record,) = shell.exit_records.values()
        return (
            shell.last_line["reason"],
            str(record.reason),
            FAULT in record.message,
            FAULT in shell.last_line["detail"],
        )

    assert at_once(train, range(TIMES)) == [("failed", "failed", True, True)] * TIMES


@pytest.mark.core
def test_after_a_fault_the_run_can_be_resumed(shell):
    shell.train(*WORDS, code=ExitCode.FAILED, TRIAL_ACT="0:6:fault")
    saved = shell.last_line["saved_step"]
    shell.train(*WORDS)
    # a save is left out while the one before is being written
    assert 1 <= saved <= shell.attempts[-1].start_step <= 5
    assert shell.inspected["step"] == 14


LOADED = ("+task.noise=true", "data.num_workers=2")
MISLABELLED = ("task._target_=tests.gpu.programs.gpu_tasks.Mislabelled", "trainer.eval_every_steps=3")
IN_EVALUATION = ("+task.wrong=eval", "trainer.sanity_batches=0")
CASES = {
    "in training": (),
    "in training, with loading processes": LOADED,
    "in training, moved by the task": ("task._target_=tests.gpu.programs.gpu_tasks.MislabelledAndMoved", *LOADED),
    "in the evaluation before it": ("+task.wrong=eval",),
    "in an evaluation": IN_EVALUATION,
    "in an evaluation, with loading processes": (*IN_EVALUATION, *LOADED),
}


@pytest.mark.parametrize("words", [(), TWO], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.core] * (name == "in training")) for name in CASES]
)
def test_a_label_out_of_range_fails_and_is_not_tried_again(name, words, shell):
    printed = shell.train(*WORDS, *MISLABELLED, *CASES[name], *words, code=ExitCode.FAILED)
    (attempt,) = shell.attempts
    assert str(attempt.reason) == "failed", printed
    assert not attempt.reason.meaning.requeued
    assert NO_CLASS in shell.last_line["detail"]
    at_fault = [record for record in shell.exit_records.values() if not record.blames_peer]
    assert {(str(record.reason), NO_CLASS in record.message) for record in at_fault} == {("failed", True)}


def test_a_label_out_of_range_is_not_a_lack_of_memory(shell):
    words = (
        *WORDS,
        "task._target_=tests.gpu.programs.gpu_tasks.Mislabelled",
        "trainer.global_batch_size=40",
        "--largest",
        "16",
    )
    printed, errors = shell.type("fit-batch", *words, code=ExitCode.FAILED)
    assert "failed: see above" in errors
    # CUDA reports an assertion on the device as either
    assert NO_CLASS in errors or "unspecified launch failure" in errors
    assert "too large" not in printed


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_one_with_the_fault_is_named(rank, shell):
    printed = shell.train(*WORDS, *TWO, code=ExitCode.FAILED, TRIAL_ACT=f"{rank}:3:fault")
    assert shell.last_line["reason"] == "failed", printed
    assert shell.last_line["detail"].startswith(f"rank {rank} on ")
    assert FAULT in shell.last_line["detail"]
    assert str(shell.exit_records[rank].reason) == "failed"
    assert not shell.exit_records[rank].blames_peer
    assert shell.processes == []


@pytest.mark.core
def test_an_illegal_memory_access_is_the_task_s_own_failure(shell):
    """Each call of CUDA fails from then on."""
    shell.train(*WORDS, code=ExitCode.FAILED, TRIAL_ACT="0:3:wild")
    (record,) = shell.exit_records.values()
    assert (shell.last_line["reason"], str(record.reason)) == ("failed", "failed")
    assert "an illegal memory access was encountered" in record.message
    assert "an illegal memory access was encountered" in shell.last_line["detail"]
    shell.train(*WORDS)
    assert shell.inspected["step"] == 14


@pytest.mark.core
@pytest.mark.parametrize(("words", "rank"), [((), 0), (TWO, 1)], ids=["one rank", "two ranks"])
def test_broken_memory_of_a_gpu_is_a_failure_of_its_node(words, rank, shell):
    shell.train(*WORDS, *words, code=ExitCode.FAILED, TRIAL_ACT=f"{rank}:3:ecc")
    assert shell.last_line["reason"] == "infrastructure"
    assert shell.last_line["detail"].startswith(f"rank {rank} on {socket.gethostname()}")
    assert "uncorrectable ECC error" in shell.last_line["detail"]
    record = shell.exit_records[rank]
    assert (str(record.reason), record.host) == ("infrastructure", socket.gethostname())


@pytest.mark.core
@pytest.mark.parametrize("words", [(), TWO], ids=["one rank", "two ranks"])
def test_too_little_gpu_memory_fails_with_advice(words, shell):
    rank = 1 if words else 0
    _, errors = shell.train(*WORDS, *words, code=ExitCode.FAILED, TRIAL_ACT=f"{rank}:3:exhaust")
    assert shell.last_line["reason"] == "failed"
    advice = "out of GPU memory: set trainer.micro_batch_size below "
    assert advice in shell.last_line["detail"]
    assert "CUDA out of memory" in shell.last_line["detail"]
    assert f"rank {rank} on " in shell.last_line["detail"]
    assert advice in errors
    assert str(shell.exit_records[rank].reason) == "failed"
