"""GPUs that aren't there, or that two ranks would share under NCCL: refused in one line, before the training."""

from __future__ import annotations

import time

import pytest

from hpctrain.errors import ExitCode
from hpctrain.launch.local import free_port, rank_variables
from hpctrain.phrases import numbered

pytestmark = [pytest.mark.gpu, pytest.mark.apart]
WORDS = ("trainer.max_steps=5", "logger.tensorboard=false", "code.snapshot=none")
SOON_S = 60.0


@pytest.mark.needs_cuda("a torch that is built for it")
def test_no_visible_gpu_is_refused(shell):
    words = ["cluster.gpus_per_node=1", *WORDS]
    out, errors = shell.train(*words, code=ExitCode.BAD_CONFIGURATION, CUDA_VISIBLE_DEVICES="")
    (line,) = errors.splitlines()
    assert line.startswith("hpctrain: error: cluster.gpus_per_node=1: this machine has no visible GPU; ")
    assert out == ""
    assert not shell.run.path.exists()


def test_a_run_that_asks_for_none_trains_on_the_cpu_of_a_machine_with_a_gpu(shell):
    printed, _ = shell.train("cluster.gpus_per_node=0", *WORDS)
    assert "1 rank on " in printed
    assert ": CPU, " in printed


@pytest.mark.needs_cuda("NCCL")
def test_two_ranks_of_nccl_on_one_gpu_are_refused_before_they_start(shell):
    words = ["cluster.processes_per_node=2", "parallel.backend=nccl", "cluster.gpus_per_node=1", *WORDS]
    _, errors = shell.train(*words, code=ExitCode.BAD_CONFIGURATION)
    (line,) = errors.splitlines()
    assert line.startswith("hpctrain: error: cluster.processes_per_node=2: ")
    assert "a node has 1" in line
    assert "NCCL" in line
    assert "parallel.backend=gloo" in line
    assert not shell.run.path.exists()


@pytest.mark.core
@pytest.mark.needs_cuda("NCCL")
def test_two_ranks_that_a_launcher_bound_to_one_gpu_name_the_binding(shell):
    """As under an srun that binds the same GPU to both: hpctrain starts neither, and only they can find out."""
    port, begin = free_port(), time.monotonic()
    words = [f"run_dir={shell.run.path}", "parallel.backend=nccl", "trainer.global_batch_size=64", *WORDS]
    ranks = [shell.start(*words, **rank_variables(rank, 2, port)) for rank in range(2)]
    printed = [rank.communicate(timeout=SOON_S) for rank in ranks]
    assert time.monotonic() - begin < SOON_S
    assert {rank.returncode for rank in ranks} <= {int(ExitCode.FAILED), int(ExitCode.BAD_CONFIGURATION)}, printed
    lines = "".join(out + errors for out, errors in printed).splitlines()
    (line,) = [line for line in lines if line.startswith("hpctrain: rank 0 on ")]
    assert numbered("rank", [0, 1]) in line
    assert " have the same GPU (" in line
    assert "CUDA_VISIBLE_DEVICES=" in line
    assert shell.last_line["reason"] == "failed"
    assert "have the same GPU" in shell.last_line["detail"]
    assert not shell.run.checkpoint_steps()
