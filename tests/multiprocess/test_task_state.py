"""Modes of modules, and what a task keeps outside of the model, are state: an interrupted run is the straight run."""

from __future__ import annotations

import pytest
import torch

from hpctrain.run.exit_record import first_cause, read_exit_records

WORDS = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.keeping.Keeping",
        "logger.tensorboard=false",
        "+task.num_samples=30",
    ),
    *("trainer.global_batch_size=6", "trainer.max_steps=10", "trainer.eval_every_steps=4", "optimizer.lr=0.01"),
    *("checkpoint.keep=20", "checkpoint.every_steps=1", "checkpoint.asynchronous=false"),
)


@pytest.mark.parametrize(
    ("kind", "world_size", "cuts"),
    [
        pytest.param("frozen", 1, (2, 6), marks=pytest.mark.nightly),
        ("overriding", 2, (3, 5)),
        pytest.param("pretrained", 1, (4,), marks=pytest.mark.nightly),
        pytest.param("unfrozen", 1, (2, 4, 7), marks=pytest.mark.nightly),
        # a throwaway backward begins each attempt
        pytest.param("unfrozen", 3, (2, 7), marks=pytest.mark.nightly),
    ],
)
def test_killed_before_and_after_the_first_evaluation(train, kind, world_size, cuts):
    options = ["+task.unfreeze_at=4"] if kind == "unfrozen" else [f"+task.kind={kind}"]
    code, straight, output = train("straight", *WORDS, *options, world_size=world_size)
    assert code == 0, output
    assert ("the model was built in evaluation mode" in output) is (kind == "pretrained")
    assert ("eval mode   5 of 9 modules: backbone" in output) is (kind != "pretrained")
    start = 0
    for cut in (*cuts, None):
        throwaway = int(world_size > 2)
        acts = [] if cut is None else [f"{rank}:{cut - start + throwaway + 1}:SIGKILL" for rank in range(world_size)]
        code, run, output = train("run", *WORDS, *options, world_size=world_size, TRIAL_ACT=",".join(acts))
        assert code == (-9 if acts else 0), output
        start = cut
    assert [attempt[0] for attempt in run.attempts] == [0, *cuts]
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)
    if kind == "unfrozen":
        saved = torch.load(run.directory.checkpoint(10) / "state.pt", weights_only=True)["extra"]
        assert [entry["state"]["losses"] for entry in saved["task"]] == [10] * world_size
        assert len({entry["state"]["mean"].item() for entry in saved["task"]}) == world_size
        assert saved["evaluation_mode"] == []


@pytest.mark.parametrize(
    ("world_size", "words"),
    [pytest.param(1, ["data.num_workers=2", "+task.noise=true"], marks=pytest.mark.nightly), (2, [])],
)
def test_the_batches_that_are_evaluated_before_the_first_step_leave_no_trace(train, world_size, words):
    words = [*WORDS, *words, "trainer.ema_decay=0.9", "trainer.max_steps=6"]
    found = []
    for number in (0, 1, 2):
        code, run, output = train(f"run_{number}", *words, f"trainer.sanity_batches={number}", world_size=world_size)
        assert code == 0, output
        found.append((run.digest, run.metrics))
    assert found[1] == found[2] == found[0]


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_mistake_in_one_ranks_evaluation_ends_all_of_them_before_the_first_step(train, wrong_rank):
    code, run, output = train("run", *WORDS, f"+task.wrong_rank={wrong_rank}", world_size=2)
    assert code == 1, output
    assert run.attempts == [(0, "failed", 0)]
    records = read_exit_records(run.directory.attempt(1))
    assert str(first_cause(records).rank) == str(wrong_rank)
    assert "Keeping.evaluate must return a dict of pairs" in records[wrong_rank].message
    assert records[1 - wrong_rank].blames_peer
