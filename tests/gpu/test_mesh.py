"""A model that two or more GPUs share, over NCCL: it trains as one GPU does, survives, and resumes on another mesh."""

from __future__ import annotations

import os

import pytest
import torch

from hpctrain.checkpoint.read import load
from hpctrain.errors import ExitCode

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
ON_HOST = "parallel.cpu_offload=true"


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


@pytest.mark.parametrize(
    "mesh",
    [FSDP, TP, PP, INTERLEAVED, (*FSDP, ON_HOST), (*TP, ON_HOST), (*PP, ON_HOST)],
    ids=" ".join,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_losses_of_one_gpu(on_all, shells, precision, mesh):
    clipped = ("trainer.clip_grad_norm=1",) if ON_HOST in mesh else ()
    alone, shared = shells(f"alone {precision} {clipped}"), on_all(f"shared {precision} {' '.join(mesh)}")
    if not alone.run.path.exists():
        alone.train(*FEW, f"precision={precision}", "cluster.processes_per_node=1", *clipped)
    mesh = (*mesh, *clipped)
    shared.train(*FEW, f"precision={precision}", *mesh)
    tolerance = 1e-4 if precision == "fp32" else 5e-2
    assert shared.logged("train/loss") == pytest.approx(alone.logged("train/loss"), rel=tolerance)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("parallel=tp",),
        ("parallel=pp",),
        (ON_HOST, "trainer.ema_decay=0.9"),
        (ON_HOST, "precision=fp16", "trainer.micro_batch_size=4", "optimizer.fused=true"),
        ("trainer.compile=true",),
        ("trainer.activation_checkpointing=[blocks.*]", "precision=bf16"),
    ],
    ids=str,
)
def test_an_interrupted_run_ends_with_the_same_bits(on_all, words):
    typed = [*FEW, *FSDP, *words, "trainer.deterministic=true"]
    straight, stopped = on_all(f"straight {words}"), on_all(f"stopped {words}")
    straight.train(*typed)
    pause = ["trainer.pause_at_step=7", "trainer.eval_every_steps=7"]
    stopped.train(*typed, *pause, code=ExitCode.INTERRUPTED)
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


def test_evaluations_of_the_average_dont_see_weights_that_the_host_changes_meanwhile(on_all):
    """A GPU copies weights from the host while the host continues; averages take their place, and give it back."""
    words = [*FEW, *FSDP, "trainer.ema_decay=0.5", "trainer.eval_every_steps=1", "optimizer.lr=0.01"]
    words += ["model.width=512", "model.num_layers=8", "model.num_heads=8"]
    device, host = on_all("averages on the device"), on_all("averages on the host")
    device.train(*words)
    host.train(*words, ON_HOST)
    assert host.logged("eval/loss") == pytest.approx(device.logged("eval/loss"), rel=1e-3)
    assert host.logged("train/loss") == pytest.approx(device.logged("train/loss"), rel=1e-3)


def test_shards_on_the_host_take_no_memory_of_a_gpu(on_all):
    words = [*FEW, *FSDP, "model.width=1024", "model.num_layers=12", "model.num_heads=8", "trainer.max_steps=3"]
    device, host = on_all("shards on the device"), on_all("shards on the host")
    device.train(*words)
    out, _ = host.train(*words, ON_HOST)
    assert " of host memory per rank: weights " in out
    # half of 16 bytes for each of 12 x 12 x 1024^2 parameters
    saved = max(device.logged("memory/peak_gb")) - max(host.logged("memory/peak_gb"))
    assert saved > 0.8 * 8 * 144 * 1024**2 / 1e9


def test_shards_move_between_the_device_and_the_host(on_all):
    shell = on_all("moves its shards")
    for last, word in ((5, ON_HOST), (10, "parallel.cpu_offload=false"), (15, ON_HOST)):
        shell.train(*FEW, *FSDP, word, "resume.allow_config_change=true", f"trainer.max_steps={last}")
    assert [one.start_step for one in shell.attempts] == [0, 5, 10]
    assert all(torch.isfinite(value.read()).all() for value in load(shell.run.checkpoint(15)).model.values())
