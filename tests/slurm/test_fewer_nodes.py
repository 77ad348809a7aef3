"""Runs that may use fewer nodes (cluster.min_nodes) on a real SLURM: they train on what there is, on the same data."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest

from hpctrain.files import read_json_lines
from hpctrain.run.directory import RunDirectory
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import STEPS, SubmittedRuns

ELASTIC = ("cluster.min_nodes=2", "checkpoint.every_steps=10", "logger.samples=true", "+task.dropout=0")
"""With them, two or four nodes can train: three don't divide the batch of 8 samples."""
QUICKLY_DOWN = "--node-timeout=10"
NODES = 4
PACE_S = 0.2
TOLERANCE = 1e-5
"""Of a loss, against the run that always had all nodes: what another order of sums changes in 80 steps."""


def assert_finished(runs: SubmittedRuns, run: FollowedRun, *sizes: int) -> None:
    """Each attempt had so many ranks; steps, samples and losses are those of a run with all nodes."""
    assert [one.world_size for one in run.attempts] == list(sizes), run
    assert run.story[-1][1:] == ("completed", STEPS), run
    changes = [one.resumed_world_size for one in run.attempts]
    expected = [before if before != size else None for before, size in pairwise(sizes)]
    assert changes == [None, *expected]
    whole = runs.straight.run(*ELASTIC[2:], processes=NODES)
    ranks = dict.fromkeys(range(1, STEPS + 1), NODES)
    assert samples(run.directory, ranks_by_step(run)) == samples(whole, ranks)
    records, of_whole = (list(read_json_lines(one.metrics)) for one in (run.directory, whole))
    assert [one["step"] for one in records] == list(range(1, STEPS + 1))
    for name in ("train/loss", "train/lr"):
        assert [one[name] for one in records] == pytest.approx([one[name] for one in of_whole], rel=TOLERANCE)


def ranks_by_step(run: FollowedRun) -> dict[int, int]:
    """The number of ranks of the last attempt that made each step."""
    found: dict[int, int] = {}
    for one in run.attempts:
        assert one.world_size is not None
        found |= dict.fromkeys(range((one.start_step or 0) + 1, STEPS + 1), one.world_size)
    return found


def samples(directory: RunDirectory, ranks: dict[int, int]) -> dict[int, list[int]]:
    """The samples of each step, over its ranks."""
    own = [
        {line["step"]: line["samples"] for line in read_json_lines(directory.sample_log(rank))} for rank in range(NODES)
    ]
    return {
        step: sorted(chain.from_iterable(own[rank][step] for rank in range(number))) for step, number in ranks.items()
    }


@pytest.mark.sandbox(QUICKLY_DOWN)
def test_a_node_dies_and_the_run_goes_on_in_the_same_job(runs: SubmittedRuns) -> None:
    run = runs.train(*ELASTIC, "cluster.memory_gb=1", pace_s=PACE_S, nodes=NODES)
    run.until_step(13)
    run.until(run.directory.checkpoint_steps, "a checkpoint")
    runs.sandbox.kill_node("n3")
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["node_failure", "completed"]
    assert run.attempts[0].next == "restart"
    assert run.attempts[1].nodes == ("n1", "n2")
    assert run.record["Restarts"] == "0"
    assert_finished(runs, run, 4, 2)
    log = run.directory.rank_log(0).read_text()
    assert "8 samples per step = 2 per forward x 2 accumulated x 2 ranks" in log
    resumed = run.attempts[1].start_step  # a later one where SLURM noticed late
    assert resumed
    assert f"2 ranks resume at step {resumed} from a checkpoint of 4 ranks" in log
    runs.sandbox.revive_node("n3")


@pytest.mark.nightly
@pytest.mark.parametrize("words", [(), ("parallel=fsdp",)])
def test_a_requeued_job_gets_fewer_nodes_and_later_more(runs: SubmittedRuns, words: tuple[str, ...]) -> None:
    """Other jobs hold nodes: it starts with three, of which it uses two, and then with all of them."""
    run = runs.train(*ELASTIC, *words, pace_s=PACE_S, nodes=NODES)
    run.until_step(13)
    holding = runs.sandbox.preempt(nodes=1, seconds=300)
    run.until_attempt(2)
    run.until_step((run.attempts[1].start_step or 0) + 5)
    assert run.record["NumNodes"] == "3", run
    assert run.attempts[1].world_size == 2, run
    runs.sandbox.ask("scancel", holding)
    runs.sandbox.wait_job(holding, "CANCELLED")
    runs.sandbox.requeue(run.job_id)
    run.until_attempt(3)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons[0] == "preempted"
    assert_finished(runs, run, 4, 2, 4)


@pytest.mark.nightly
def test_a_run_starts_with_the_nodes_that_are_free(runs: SubmittedRuns) -> None:
    holding = runs.sandbox.preempt(nodes=2, seconds=300)
    runs.sandbox.wait_job(holding, "RUNNING")
    run = runs.train(*ELASTIC, pace_s=0, nodes=NODES)
    assert run.until_ended() == "COMPLETED"
    assert_finished(runs, run, 2)
    runs.sandbox.ask("scancel", holding)
