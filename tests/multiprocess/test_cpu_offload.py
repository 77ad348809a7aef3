"""Shards in host memory, which tests/gpu runs on GPUs: here, the same code leaves every bit as it is."""

from __future__ import annotations

import pytest

from hpctrain.config import checks
from tests.multiprocess.programs.offloaded import WITHOUT_GPU

TRAINING = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.trial.Trial",
        "logger.tensorboard=false",
        "checkpoint.keep=100",
    ),
    *("schedule=cosine", "optimizer.lr=0.01", "trainer.global_batch_size=12", "trainer.max_steps=7"),
    *("+task.num_samples=56", "+task.dropout=0.3", "+task.batchnorm=true", "+task.noise=true", "+task.width=18"),
    *("logger.every_steps=3", "trainer.ema_decay=0.9", "trainer.eval_every_steps=5", "trainer.log_grad_norm=true"),
)
FSDP = ("parallel=fsdp",)
HSDP = ("parallel=mesh", "parallel.replicate_degree=2")
TP = (
    "parallel=fsdp_tp",
    "parallel.tensor_degree=2",
    "task._target_=tests.multiprocess.programs.divided.Single",
    "trainer.clip_grad_norm=0.5",
)
TP = (*TRAINING[:8], *TRAINING[-4:], *TP)
PIPED = (
    "parallel=pp",
    "task._target_=tests.multiprocess.programs.divided.Single",
    "trainer.micro_batch_size=6",
    "trainer.clip_grad_norm=0.5",
)


@pytest.fixture
def trained(train, monkeypatch):
    """Trains a run in several attempts, each with shards in host memory or not; all but the last one are stopped."""
    monkeypatch.setattr(checks, "NEEDS_GPU", WITHOUT_GPU)

    def run(name, world_size, words, *offloads):
        for number, offload in enumerate(offloads, start=1):
            is_last = number == len(offloads)
            options = {"target": "offloaded:rank", "TRIAL_ACT": "" if is_last else "1:3:SIGTERM"}
            given = [*words, f"parallel.cpu_offload={str(offload).lower()}"]
            code, run, output = train(name, *given, world_size=world_size, **options)
            assert code == (0 if is_last else 4), output
        assert len(run.attempts) == len(offloads)
        return run, output

    return run


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, (*TRAINING, *FSDP, "trainer.clip_grad_norm=0.5", "precision=fp16", "precision.loss_scale_growth_steps=3")),
        nightly(2, (*TRAINING, *FSDP, "precision=bf16", "optimizer.fused=true")),
        nightly(2, (*TRAINING, *FSDP, "precision=fp16", "optimizer.fused=true")),
        nightly(2, (*TRAINING, *FSDP, "precision=bf16_pure", "trainer.clip_grad_value=0.001")),
        nightly(2, (*TRAINING, *FSDP, "optimizer=muon")),
        nightly(4, (*TRAINING, *HSDP, "trainer.global_batch_size=16", "trainer.micro_batch_size=2")),
        nightly(2, (*TRAINING, *FSDP, "trainer.micro_batch_size=2", "parallel.keep_gradients_whole=true")),
        nightly(4, TP),
        nightly(2, (*TP[:-4], *PIPED)),
        nightly(4, (*TP, "precision=fp16", "+task.partial=true")),
    ],
    ids=lambda value: " ".join(value[12:]) if isinstance(value, tuple) else str(value),
)
def test_every_bit_is_that_of_shards_on_the_device(trained, world_size, words):
    expected, _ = trained("on the device", world_size, words, False)
    found, output = trained("in host memory", world_size, words, True, True)
    assert (found.digest, found.metrics) == (expected.digest, expected.metrics)
    assert " of host memory per rank: weights " in output


@pytest.mark.nightly
def test_a_run_moves_its_shards(trained):
    """From the device to host memory and back, with as many ranks."""
    words = [*TRAINING, *FSDP, "resume.allow_config_change=true"]
    expected, _ = trained("straight", 2, words, False)
    found, _ = trained("moves", 2, words, False, True, False)
    assert (found.digest, found.metrics) == (expected.digest, expected.metrics)
