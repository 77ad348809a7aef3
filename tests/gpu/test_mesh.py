"""A model that two or more GPUs share, over NCCL: it trains as one GPU does, survives, and resumes on another mesh."""

from __future__ import annotations

import os

import pytest
import torch

from hpctrain.checkpoint.read import load

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU"),
    # they take all GPUs
    pytest.mark.xdist_group("all GPUs"),
]
FEW = ("task=text", "model=gpt", "trainer.global_batch_size=16", "trainer.max_steps=20", "logger.every_steps=1")
FSDP = ("parallel=fsdp", "cluster.processes_per_node=2")
TP = ("parallel=tp", "cluster.processes_per_node=2")
PP = ("parallel=pp", "cluster.processes_per_node=2")
INTERLEAVED = ("parallel=pp", "parallel.stages_per_rank=2", "cluster.processes_per_node=2")


@pytest.fixture
def on_all(shells):
    """A shell on all GPUs, by name."""

    def shell(name):
        made = shells(name)
        made.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            made.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        return made

    return shell


@pytest.mark.parametrize("mesh", [FSDP, TP, PP, INTERLEAVED], ids=" ".join)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_losses_of_one_gpu(on_all, shells, precision, mesh):
    alone, shared = shells(f"alone {precision} {' '.join(mesh)}"), on_all(f"shared {precision} {' '.join(mesh)}")
    alone.train(*FEW, f"precision={precision}", "cluster.processes_per_node=1")
    shared.train(*FEW, f"precision={precision}", *mesh)
    tolerance = 1e-4 if precision == "fp32" else 5e-2
    assert shared.logged("train/loss") == pytest.approx(alone.logged("train/loss"), rel=tolerance)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("parallel=tp",),
        ("parallel=pp",),
        ("trainer.compile=true",),
        ("trainer.activation_checkpointing=[blocks.*]", "precision=bf16"),
    ],
    ids=str,
)
def test_an_interrupted_run_ends_with_the_same_bits(on_all, words):
    typed = [*FEW, *FSDP, *words, "trainer.deterministic=true"]
    straight, stopped = on_all(f"straight {words}"), on_all(f"stopped {words}")
    straight.train(*typed)
    stopped.train(*typed, "trainer.pause_at_step=7", "trainer.eval_every_steps=7")
    stopped.type("resume", str(stopped.run.path))
    assert len(stopped.attempts) > 1
    assert stopped.digest == straight.digest


def test_another_mesh_continues_and_one_process_reads_it(on_all):
    shell = on_all("moves")
    shell.train(*FEW, *FSDP, "trainer.max_steps=5")
    words = ["resume.allow_config_change=true", "parallel=ddp", "cluster.processes_per_node=2", "trainer.max_steps=10"]
    shell.train(*FEW, *words)
    assert [one.start_step for one in shell.attempts] == [0, 5]
    sharded = load(shell.run.checkpoint(5)).model
    assert all(torch.isfinite(value.read()).all() for value in sharded.values())
