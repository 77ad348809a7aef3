"""Callbacks and schedules with state, and early ends: an interrupted run is the straight run."""

from __future__ import annotations

import random

import pytest
import torch

from hpctrain.files import read_json_lines

TRIAL = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.trial.Trial",
        "+task.batchnorm=true",
        "+task.dropout=0.3",
    ),
    *("trainer.global_batch_size=8", "trainer.micro_batch_size=2", "optimizer=sgd", "optimizer.lr=0.05"),
)
DIGITS = ("task=digits", "trainer.global_batch_size=32", "optimizer.lr=0.01")
TEXT = (
    *("task=text", "task.context_length=16", "model=gpt", "model.context_length=16", "model.width=16"),
    *("model.num_heads=2", "model.num_layers=1", "trainer.global_batch_size=8", "task.held_out=0.01"),
)
WATCHED = (
    *("trainer.max_steps=12", "trainer.eval_every_steps=2", "logger.every_steps=5", "logger.measure=false"),
    *("logger.tensorboard=false", "trainer.sanity_batches=0"),
    *("checkpoint.every_steps=1", "checkpoint.keep=20", "checkpoint.asynchronous=false"),
    "+callbacks.killer._target_=tests.multiprocess.programs.watching.Killer",
)
FOLLOWING = "+callbacks.following._target_=tests.multiprocess.programs.watching.Following"
STOPPING = ("callbacks=[early_stopping]", "callbacks.early_stopping.patience=3", "callbacks.early_stopping.min_delta=9")
PLATEAU = ("schedule=plateau", "schedule.patience=0", "schedule.threshold=0.5", "schedule.warmup_steps=3")
OWN = ("schedule=custom", "schedule._target_=tests.multiprocess.programs.watching.triangular")
ONE_CYCLE = ("schedule=custom", "schedule._target_=torch.optim.lr_scheduler.OneCycleLR", "+schedule.max_lr=0.2")
IN_TURN = ("schedule=custom", "schedule._target_=tests.multiprocess.programs.watching.in_turn")
AVERAGE = ("callbacks=[average_weights]", "callbacks.average_weights.start_fraction=0.2")
SEVERAL = (
    "optimizer=named",
    "+optimizer.named.first={_target_: torch.optim.SGD, lr: 0.1, match: '0.*'}",
    "+optimizer.named.first.schedule={kind: plateau, patience: 0, threshold: 0.5}",
    "+optimizer.named.rest={_target_: torch.optim.AdamW, lr: 0.01}",
    "+optimizer.named.rest.schedule={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1}",
)
CASES = {
    "early stopping": (*TRIAL, *STOPPING),
    "average of all": (*TRIAL, *AVERAGE),
    "average of the last": (*TRIAL, *AVERAGE, "callbacks.average_weights.num_last=3"),
    "weights": (*TRIAL, "callbacks=[log_weights]", "callbacks.log_weights.every_steps=3"),
    "pictures": (*DIGITS, "callbacks=[log_images]", "callbacks.log_images.num_images=4"),
    "text": (*TEXT, "callbacks=[log_text]", "callbacks.log_text.new_tokens=5", "callbacks.log_text.prompt_tokens=5"),
    "plateau": (*TRIAL, *PLATEAU),
    "own function": (*TRIAL, *OWN),
    "one cycle": (*TRIAL, *ONE_CYCLE),
    "several schedulers": (*TRIAL, *IN_TURN),
    "a schedule per optimizer": (*(word for word in TRIAL if not word.startswith("optimizer")), *SEVERAL, FOLLOWING),
    "everything": (*TRIAL, *ONE_CYCLE, *STOPPING, FOLLOWING, "trainer.ema_decay=0.9"),
}


def state_of(run):
    path = run.directory.checkpoint(run.steps[-1]) / "state.pt"
    extra = torch.load(path, weights_only=True)["extra"]
    del extra["ending"]["trained_s"]
    return {name: str(extra[name]) for name in ("callbacks", "schedule", "ending", "best") if name in extra}


def outcome(run):
    """Weights, records, the steps of the checkpoints, the states, and the average that a callback wrote."""
    file = run.directory.path / "averaged.pt"
    averaged = str(torch.load(file, weights_only=True)) if file.exists() else ""
    media = [
        {key: value for key, value in record.items() if key != "time"}
        for record in (read_json_lines(run.directory.media_records) if run.directory.media_records.exists() else ())
    ]
    return run.digest, run.metrics, run.steps, state_of(run), averaged, media


@pytest.fixture
def killed(train):
    """Kill a run at several places, finish it, and return its outcome and that of an uninterrupted run."""

    def compare(words, world_size, places):
        code, straight, output = train("straight", *words, *WATCHED, world_size=world_size)
        assert code == 0, output
        for place in (*places, ""):
            code, run, output = train("run", *words, *WATCHED, world_size=world_size, KILL_AT=place)
            assert code == (-9 if place else 0), output
        assert len(run.attempts) == len(places) + 1
        return straight, run, output

    return compare


@pytest.mark.parametrize(("world_size", "places"), [(2, ["before_step:3", "before_step:7"])])
def test_an_early_end_comes_at_the_same_step_in_a_run_that_is_killed(killed, world_size, places):
    straight, run, output = killed(CASES["everything"], world_size, places)
    assert outcome(run) == outcome(straight)
    # the first of four evaluations was the best
    assert run.attempts[-1] == (7, "completed", 8)
    assert "step 8: the run ends here: early_stopping: loss hasn't improved in 3 evaluations" in output


@pytest.mark.nightly
def test_a_plateau_of_a_run_that_is_killed_in_an_evaluation_is_the_straight_runs(killed):
    straight, run, _ = killed(CASES["plateau"], 1, ["after_evaluation:6", "before_step:9"])
    assert outcome(run) == outcome(straight)
    assert len({record["train/lr"] for record in run.metrics if "train/lr" in record}) > 1


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_killed_at_three_random_steps(killed, case, world_size):
    last = 8 if "callbacks.early_stopping.patience=3" in CASES[case] else 12
    draws = random.Random(f"{case} {world_size}")
    places = [f"before_step:{step}" for step in sorted(draws.sample(range(1, last - 1), 3))]
    if world_size == 1:
        places += [f"after_evaluation:{last}", f"on_end:{last}"]
    straight, run, _ = killed(CASES[case], world_size, places)
    assert outcome(run) == outcome(straight)
