"""A run that is killed, or stopped, on a GPU ends as an uninterrupted one does, to the last bit.

Each test makes runs of its own, so that several workers share the file.
"""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch

from hpctrain.checkpoint.compare_saves import compare_saves
from hpctrain.errors import ExitCode

pytestmark = [pytest.mark.gpu, pytest.mark.apart]
SEED = 20
"""Of the places and the signals of the interruptions."""
PICTURES = (
    "task=custom",
    "task._target_=tests.gpu.programs.gpu_tasks.Pictures",
    "+task.noise=true",
    "+task.dropout=0.3",
)
STEPS, LONGEST = 14, 3
WORDS = (
    *PICTURES,
    "trainer.global_batch_size=16",
    "trainer.micro_batch_size=4",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.deterministic=true",
    "trainer.ema_decay=0.9",
    "trainer.clip_grad_norm=1.0",
    "schedule=cosine",
    "optimizer.lr=0.01",
    "logger.every_steps=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep_best=1",
)
"""40 samples are three steps an epoch: two of 4 micro-batches, and one of 2."""
CASES = {
    "fp32": ["data.num_workers=0"],
    "fp32, loading processes": ["data.num_workers=2"],
    "bf16, fused": ["precision=bf16", "optimizer.fused=true", "data.num_workers=2"],
    "fp16": ["precision=fp16", "precision.loss_scale_growth_steps=3"],
    "fp16_master, fused": ["precision=fp16_master", "optimizer.fused=true"],
    "channels last": ["trainer.channels_last=true", "precision=tf32"],
}
CORE = {"bf16, fused": pytest.mark.core}
EXACT = ("fp32", "tf32", "bf16", "fp16", "bf16_pure", "fp16_master")


def interruptions(name):
    """Three of them: the call of the loss, counted in each attempt, that the signal comes in, and the signal.

    None is so late that the run is over, and both signals occur.
    """
    draws = random.Random(f"{SEED} {name}")
    signals = ["SIGKILL", "SIGUSR2", draws.choice(["SIGKILL", "SIGUSR2"])]
    draws.shuffle(signals)
    return [(draws.randint(1, 4 * LONGEST), chosen) for chosen in signals]


@pytest.fixture
def both(shells, at_once):
    """Trains a case without interruptions, and with three of them; returns both shells."""

    def straight(name):
        shells((name, False)).train(*WORDS, *CASES[name])
        return shells((name, False))

    def interrupted(name):
        shell, words = shells((name, True)), [*WORDS, *CASES[name]]
        for number, (call, chosen) in enumerate(interruptions(name)):
            code = -signal.SIGKILL if chosen == "SIGKILL" else ExitCode.INTERRUPTED
            act = {"TRIAL_ACT": f"0:{call}:{chosen}"}
            if number == 1:
                shell.type("resume", str(shell.run.path), code=code, **act)
            else:
                shell.train(*words, code=code, **act)
        shell.train(*words)
        return shell

    return lambda name: at_once(lambda train: train(name), [straight, interrupted])


@pytest.mark.parametrize("name", [pytest.param(name, marks=CORE.get(name, ())) for name in CASES])
def test_an_interrupted_run_is_the_straight_run(both, name):
    straight, run = both(name)
    reasons = [str(attempt.reason) for attempt in run.attempts]
    assert reasons.count("completed") == 1
    assert "interrupted" in reasons
    assert "infrastructure" in reasons
    assert len(reasons) == 4
    assert run.inspected["step"] == straight.inspected["step"] == STEPS
    assert run.digest == straight.digest
    assert run.metrics == straight.metrics
    found = compare_saves(run.run.checkpoint(STEPS), straight.run.checkpoint(STEPS))
    # only the training time is by the clock
    assert (found.differing, found.numbers, found.unreadable) == ([], ["state.pt:extra.ending.trained_s"], {})
    assert found.equal > 20


def test_another_seed_would_be_noticed(shells, at_once):
    seeds = (0, 1)
    at_once(lambda seed: shells(seed).train(*WORDS, f"seed={seed}"), seeds)
    assert len({shells(seed).digest for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("precision", EXACT)
def test_deterministic_runs_are_bit_equal_and_so_is_an_interrupted_one(precision, shells, at_once):
    words = ["trainer.deterministic=true", f"precision={precision}", "schedule=constant"]

    def digest(job):
        name, stops = job
        shell = shells((precision, name))
        for stop in stops:
            shell.train(*words, f"trainer.max_steps={stop}")
        return shell.digest

    assert len(set(at_once(digest, [("a", [20]), ("b", [20]), ("c", [7, 20])]))) == 1


def test_a_stop_while_the_gpu_computes_is_saved_and_the_run_ends_as_a_straight_one(shells, wait_until):
    """The signal comes while the rank waits for a kernel of several seconds."""
    straight, stopped = shells("straight"), shells("stopped")
    words = [*WORDS, "logger.every_steps=1", "data.num_workers=0"]
    straight.train(*words)
    acted = stopped.folder / "acted"
    acts = {"TRIAL_ACT": "0:18:spin_6", "TRIAL_ACTED": str(acted)}
    process = stopped.start_training(*words, **acts)
    wait_until(acted.exists)
    # by now the rank waits for the step's loss
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    stopped.wait(process, ExitCode.INTERRUPTED)
    assert stopped.last_line["reason"] == "interrupted"
    saved = stopped.inspected["step"]
    assert saved == stopped.last_line["step"] == stopped.last_line["saved_step"]
    assert 0 < saved < STEPS
    stopped.type("resume", str(stopped.run.path))
    assert stopped.digest == straight.digest
    assert stopped.metrics == straight.metrics


def test_a_resumed_run_goes_on_from_the_checkpoint(shell):
    shell.train("trainer.max_steps=10", "precision=fp16")
    shell.train("trainer.max_steps=20", "precision=fp16")
    assert shell.inspected["step"] == 20
    assert [attempt.start_step for attempt in shell.attempts] == [0, 10]


@pytest.mark.parametrize("fused", [("false", "true"), ("true", "false")], ids=" to ".join)
def test_a_run_goes_on_with_another_kernel_for_its_updates(fused, shell):
    for words in ([f"optimizer.fused={fused[0]}"], [f"optimizer.fused={fused[1]}", "resume.allow_config_change=true"]):
        shell.train(*words, "schedule=constant", f"trainer.max_steps={10 * len(words)}")
    assert shell.inspected["step"] == 20
    state = torch.load(shell.run.checkpoint(20) / "optimizer.pt", weights_only=True)["state"]
    assert {entry["step"].item() for entry in state.values()} == {20}
