"""A run that pauses and is resumed, again and again, is the straight run."""

from __future__ import annotations

import itertools

import pytest

QUIET = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "logger.tensorboard=false",
    "checkpoint.keep=100",
    "+task.dropout=0.3",
    "+task.batchnorm=true",
    "+task.noise=true",
    "+task.num_samples=56",
    "trainer.global_batch_size=12",
    "trainer.max_steps=14",
    "logger.every_steps=3",
)
"""Five steps an epoch."""
STOPPING = ("callbacks.early_stopping.min_delta=9", "callbacks.early_stopping.patience=2")
WATCHED = ("schedule=plateau", "schedule.patience=0", "callbacks=[early_stopping]", "trainer.ema_decay=0.9")
CASES = {
    "epochs": ((), (5, 10)),
    "steps": (("trainer.eval_every_steps=4", *WATCHED), (4, 8, 12)),
    "early stopping": (
        ("trainer.eval_every_steps=2", *WATCHED, *STOPPING),
        (2, 4),
    ),
    "saves": (("trainer.eval_every_steps=3", "checkpoint.every_steps=2", "checkpoint.keep_best=2"), (3, 6, 9, 12)),
    "clock": (("trainer.eval_every_steps=5", "checkpoint.every_min=0.001", "trainer.max_time_min=60"), (5, 10)),
    "epochs as length": (("trainer.max_steps=null", "trainer.max_epochs=2", "checkpoint.keep_best=1"), (5,)),
    "no evaluation": (("+task.eval_samples=0",), (3, 7, 11)),
}
GATE = {("epochs", 2)}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(*case, marks=() if case in GATE else pytest.mark.nightly)
        for case in itertools.product(CASES, (1, 2))
    ],
)
def test_a_run_that_pauses_and_continues_is_the_straight_run(train, name, world_size):
    words, pauses = CASES[name]
    code, straight, output = train("straight", *QUIET, *words, world_size=world_size)
    assert code == 0, output
    for step in pauses:
        code, run, output = train("run", *QUIET, *words, f"trainer.pause_at_step={step}", world_size=world_size)
        assert (code, run.attempts[-1][1:]) == (4, ("paused", step)), output
        assert f"the run pauses here: trainer.pause_at_step={step} is reached" in output
    # the last pause again: it has passed
    code, run, output = train("run", *QUIET, *words, f"trainer.pause_at_step={pauses[-1]}", world_size=world_size)
    assert code == 0, output
    assert f"already paused at trainer.pause_at_step={pauses[-1]}; continuing" in output
    assert run.attempts[-1] == (pauses[-1], *straight.attempts[-1][1:])
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_and_stopped_around_its_pauses(train, world_size):
    """A kill after the save of a pause and before its record, and stops between pauses and in the evaluation."""
    words = (*QUIET, "trainer.eval_every_steps=4", *WATCHED)
    code, straight, output = train("straight", *words, world_size=world_size)
    assert code == 0, output
    last, throwaway = world_size - 1, 0
    for pause, act in ((5, f"{last}:2:SIGTERM"), (5, ""), (9, f"{last}:{1 + throwaway}:SIGUSR2"), (9, "")):
        code, run, output = train("run", *words, f"trainer.pause_at_step={pause}", world_size=world_size, TRIAL_ACT=act)
        assert code == 4, output
        assert run.attempts[-1][1] == ("interrupted" if act else "paused")
    ledger = run.directory.attempts
    assert run.attempts[-1][2] == 12
    # as if it had been killed before the end was recorded
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    (run.directory.attempt(len(run.attempts)) / "ended").unlink()
    for record in run.directory.attempt(len(run.attempts)).glob("rank_*.json"):
        record.unlink()
    words = (*words, "trainer.pause_at_step=9")
    code, run, output = train("run", *words, world_size=world_size)
    assert (code, run.attempts[-1]) == (4, (12, "paused", 12)), output
    code, run, output = train("run", *words, world_size=world_size)
    assert code == 0, output
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)
