"""Four nodes that share a model on a real SLURM: the run ends as a straight one does, whatever happens to them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.files import TEMPORARY_PREFIX
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import STEPS, SubmittedRuns

FSDP = "parallel=fsdp"
OFTEN = "checkpoint.every_steps=10"
QUICKLY_DOWN = "--node-timeout=10"
NODES = 4
PACE_S = 0.2


def assert_survived(
    runs: SubmittedRuns,
    run: FollowedRun,
    *reasons: str,
    mesh: tuple[str, ...] = (FSDP,),
    words: tuple[str, ...] = (),
    nodes: int = NODES,
) -> None:
    """One attempt ended for each reason, and the last one ended as a straight run does."""
    assert run.reasons == [*reasons, "completed"], run
    assert run.story[-1][2] == STEPS
    assert run.digest == runs.straight(*mesh, *words, processes=nodes), run
    assert not unfinished(run)
    parts = {path.name for path in run.directory.checkpoint(STEPS).iterdir() if path.suffix == ".distcp"}
    assert parts == {f"__{rank}_0.distcp" for rank in range(nodes)}


def unfinished(run: FollowedRun) -> list[Path]:
    return list(run.directory.checkpoints.glob(f"{TEMPORARY_PREFIX}*"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def exchange(path: Path) -> None:
    other = path.with_name("__1_0.distcp")
    mine, yours = path.read_bytes(), other.read_bytes()
    path.write_bytes(yours)
    other.write_bytes(mine)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, r" doesn't match its checksum"),
    "cut": (cut, r" has \d+ bytes instead of \d+"),
    "missing": (Path.unlink, r" is missing"),
    "exchanged": (exchange, r" (doesn't match its checksum|has \d+ bytes instead)"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "nodes"), [("flipped", 2), *((one, NODES) for one in DAMAGES)])
def test_preempted_and_a_part_of_the_newest_checkpoint_is_damaged(runs: SubmittedRuns, name: str, nodes: int) -> None:
    """The next attempt names the part, sets the checkpoint aside, and continues from the one before."""
    damage, problem = DAMAGES[name]
    part = f"__{nodes // 2}_0.distcp"
    run = runs.train(FSDP, OFTEN, pace_s=PACE_S, nodes=nodes)
    run.until_step(13)
    run.preempt()
    run.until(lambda: run.attempts and not run.attempts[0].open, "the end of the first attempt")
    newest = max(run.directory.checkpoint_steps())
    damage(run.directory.checkpoint(newest) / part)
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "preempted", nodes=nodes)
    first, second = run.attempts
    assert first.end_step == newest
    assert (second.start_step or 0) < newest
    assert re.search(re.escape(part) + problem, run.directory.rank_log(0).read_text()), run
    assert [path.name.startswith(f"damaged-step_{newest:08}") for path in run.directory.set_aside()] == [True]


@pytest.mark.nightly
@pytest.mark.sandbox(QUICKLY_DOWN)
@pytest.mark.parametrize("node", ["n3", "n1"])
def test_a_node_dies_in_the_middle_of_a_save(runs: SubmittedRuns, node: str) -> None:
    """Rank zero writes a large buffer meanwhile; n1 is the batch host."""
    takes_time = "+task.ballast_mb=60"
    run = runs.train(FSDP, OFTEN, takes_time, "cluster.memory_gb=1", pace_s=PACE_S, nodes=NODES)
    run.until_step(5)
    run.until(run.directory.checkpoint_steps, "a checkpoint")
    rank_zero, half = run.rank(0), []
    while not half:
        run.until(lambda: unfinished(run), "another save")
        os.kill(rank_zero, signal.SIGSTOP)
        half = unfinished(run)
        if not half:
            os.kill(rank_zero, signal.SIGCONT)
    runs.sandbox.kill_node(node)
    if node != "n1":
        os.kill(rank_zero, signal.SIGCONT)
    run.until(lambda: run.record["Restarts"] == "1", "SLURM's requeue")
    # the run needs all four nodes
    runs.sandbox.revive_node(node)
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "node_failure", words=(takes_time,))


@pytest.mark.nightly
def test_preempted_while_the_ranks_of_each_node_compute_layers_together(runs: SubmittedRuns) -> None:
    mesh = "parallel=fsdp_tp"
    run = runs.train(mesh, OFTEN, "cluster.processes_per_node=2", pace_s=PACE_S)
    run.until_step(13)
    run.preempt()
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "preempted", mesh=(mesh, "parallel.tensor_degree=2"))
    first, second = run.attempts
    assert second.start_step == first.end_step


@pytest.mark.nightly
def test_a_rank_is_killed(runs: SubmittedRuns) -> None:
    run = runs.train(FSDP, OFTEN, "+task.act='1:3:15:SIGKILL'", pace_s=0, nodes=NODES)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "infrastructure")


@pytest.mark.nightly
def test_a_pipeline_over_four_nodes(runs: SubmittedRuns) -> None:
    """Preempted, then a rank is killed; two of its stages have no parameters."""
    run = runs.train("parallel=pp", OFTEN, "+task.act='2:1:90:SIGKILL'", pace_s=0.02, nodes=NODES)
    run.until_step(13)
    run.preempt()
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["preempted", "infrastructure", "completed"], run
    assert run.digest == runs.straight("parallel=pp", processes=NODES), run
    assert not unfinished(run)
