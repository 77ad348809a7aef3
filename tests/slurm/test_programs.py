"""Programs that aren't hpctrain's, on a real SLURM: they survive what a training survives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import PROGRAMS, SubmittedRuns

STEPS = 60
SHELL = """\
cd $HPCTRAIN_SUBMIT_DIR
echo started >> starts
until [ -e go ]; do sleep 0.2; done
test $(wc -l < starts) -ge 3
"""


def ddp(run: FollowedRun, *options: str) -> list[str]:
    return [sys.executable, str(PROGRAMS / "bare_ddp.py"), str(run.pace), str(STEPS), *options]


def printed_step(run: FollowedRun) -> int:
    """The last step that rank zero printed; resumed ones are printed again."""
    log = run.directory.rank_log(0)
    steps = re.findall(r"^step (\d+)$", log.read_text(), re.MULTILINE) if log.exists() else []
    return int(steps[-1]) if steps else 0


def until_printed(run: FollowedRun, attempt: int, steps: int) -> None:
    """Wait until an attempt has made so many steps."""
    run.until_attempt(attempt)
    saved = run.directory.checkpoints / "saved.pt"
    begun = torch.load(saved)["step"] if saved.exists() else 0
    run.until(lambda: begun + steps <= printed_step(run), f"step {begun + steps} of attempt {attempt}")


def child_of(pid: int) -> int:
    """The program of a rank."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (program,) = [int(child) for child in children if "bare_ddp" in Path(f"/proc/{child}/cmdline").read_text()]
    return program


@pytest.fixture(scope="module")
def straight_weights(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of the DDP script on two ranks, which nothing interrupts, by the same command on this machine."""
    folder = tmp_path_factory.mktemp("straight_program")
    (folder / "pace").write_text("0")
    script = [sys.executable, str(PROGRAMS / "bare_ddp.py"), str(folder / "pace"), str(STEPS)]
    words = ["cluster.processes_per_node=2", "run_dir=run", "code.snapshot=none"]
    command = [sys.executable, "-m", "hpctrain", "run", *words, "--", *script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / "run" / "checkpoints" / "final.pt")


def assert_exact(run: FollowedRun, straight: Any) -> None:
    found = torch.load(run.directory.checkpoints / "final.pt")
    assert found.keys() == straight.keys()
    assert all(torch.equal(found[name], straight[name]) for name in straight), run


@pytest.mark.nightly
def test_programs_without_any_contract_survive_a_preemption_a_killed_rank_and_the_time_limit(
    runs: SubmittedRuns, straight_weights: Any, tmp_path: Path
) -> None:
    """Both at once: SLURM takes half a minute to start them again."""
    trained, shell = runs.new(), runs.new()
    (tmp_path / "long.sh").write_text(SHELL)
    runs.launch(trained, ddp(trained))
    runs.launch(shell, ["bash", "long.sh"], nodes=1)

    until_printed(trained, 1, 3)
    shell.until((tmp_path / "starts").exists, "the shell script")
    trained.preempt()  # all nodes
    until_printed(trained, 2, 3)
    os.kill(trained.rank(1), signal.SIGKILL)
    shell.until_attempt(2)
    runs.sandbox.ask("scancel", "--signal=USR2", shell.job_id)  # what SLURM sends before the time limit
    until_printed(trained, 3, 3)
    trained.set_pace(0)
    shell.until_attempt(3)
    (tmp_path / "go").touch()

    assert trained.until_ended() == "COMPLETED"
    assert trained.reasons == ["preempted", "infrastructure", "completed"], trained
    assert [one.next for one in trained.attempts] == ["requeue", "restart", None]
    assert_exact(trained, straight_weights)
    assert shell.until_ended() == "COMPLETED"
    assert shell.reasons == ["preempted", "time_limit", "completed"], shell
    assert {one.job_id for one in shell.attempts} == {shell.job_id}
    assert shell.batch_log.count("shows how a program reports it") == 2, (
        "once in each allocation that didn't complete it"
    )


def preempt_once(run: Any) -> None:
    """Preempt a program after a few steps, and let it complete in its second attempt."""
    until_printed(run, 1, 3)
    run.preempt()
    until_printed(run, 2, 3)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["preempted", "completed"], run


@pytest.mark.nightly
def test_a_shell_script_is_requeued_at_its_time_limit_until_its_own_exit_0(runs: SubmittedRuns, tmp_path: Path) -> None:
    run = runs.new()
    (tmp_path / "long.sh").write_text(SHELL)
    limits = ("cluster.time_limit_min=1", "cluster.signal_delay_s=20")
    runs.launch(run, ["bash", "long.sh"], *limits, nodes=1)
    for attempt in (1, 2, 3):
        run.until_attempt(attempt)
    (tmp_path / "go").touch()
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["time_limit", "time_limit", "completed"], run


@pytest.mark.nightly
@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.sandbox(option), id=option)
        for option in ("--preempt-mode=CANCEL", "--grace-time=0", "--preempt-send-user-signal")
    ],
)
def test_preempted_by_other_rules(runs: SubmittedRuns, straight_weights: Any) -> None:
    run = runs.new()
    runs.launch(run, ddp(run))
    preempt_once(run)
    assert_exact(run, straight_weights)


@pytest.mark.nightly
def test_at_its_time_limit(runs: SubmittedRuns, straight_weights: Any) -> None:
    run = runs.new()
    run.set_pace(2)
    # SLURM looks every 30 s, and would warn a program with more delay while it starts
    runs.launch(run, ddp(run), "cluster.time_limit_min=1", "cluster.signal_delay_s=5")
    until_printed(run, 2, 1)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert set(run.reasons[:-1]) == {"time_limit"}, run
    assert run.reasons[-1] == "completed", run
    assert_exact(run, straight_weights)


@pytest.mark.nightly
def test_a_program_that_is_killed_is_started_again(runs: SubmittedRuns, straight_weights: Any) -> None:
    run = runs.new()
    runs.launch(run, ddp(run))
    until_printed(run, 1, 3)
    os.kill(child_of(run.rank(1)), signal.SIGKILL)
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["infrastructure", "completed"], run
    assert "killed by SIGKILL" in run.attempts[0].detail
    assert_exact(run, straight_weights)


@pytest.mark.nightly
def test_a_rank_that_makes_no_steps_any_more_hangs_if_its_program_reports_them(
    runs: SubmittedRuns, straight_weights: Any
) -> None:
    run = runs.new()
    runs.launch(run, ddp(run, "--reports"), "health.hang_timeout_s=8")
    until_printed(run, 1, 3)
    os.kill(child_of(run.rank(1)), signal.SIGSTOP)
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["hang", "completed"], run
    assert_exact(run, straight_weights)


@pytest.mark.nightly
def test_torchrun_starts_the_ranks_of_each_node(runs: SubmittedRuns) -> None:
    run = runs.new()
    torchrun = [str(Path(sys.executable).with_name("torchrun")), *ddp(run)[1:]]
    runs.launch(run, torchrun, "run.processes=node", "cluster.processes_per_node=2")
    preempt_once(run)
    assert run.attempts[0].world_size == 2, "one process per node is hpctrain's"
    steps = [int(step) for step in re.findall(r"^step (\d+)$", run.directory.rank_log(0).read_text(), re.MULTILINE)]
    assert steps.count(1) == 2, "by both ranks of the node, in the first attempt alone"
    assert steps.count(STEPS) == 2


@pytest.mark.nightly
@pytest.mark.sandbox("--node-timeout=10")
def test_a_node_dies(runs: SubmittedRuns, straight_weights: Any) -> None:
    run = runs.new()
    runs.launch(run, ddp(run, "--reports"))
    until_printed(run, 1, 3)
    run.preempt()  # it saves
    until_printed(run, 2, 3)
    dead = run.attempts[1].nodes[1]
    runs.sandbox.kill_node(dead)
    until_printed(run, 3, 1)
    runs.sandbox.revive_node(dead)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["preempted", "node_failure", "completed"], run
    assert run.attempts[2].start_step == run.attempts[0].end_step
    assert_exact(run, straight_weights)


def test_a_batch_script_of_ones_own_runs_a_program(runs: SubmittedRuns, tmp_path: Path) -> None:
    run = runs.new()
    script, options = PROGRAMS.parents[2] / "slurm" / "program.sbatch", ["--nodes=2", f"--output={tmp_path}/own.log"]
    words = [f"run_dir={run.directory.path}", "args.word=there", "--", "sh", "-c", "test {args.word} = there"]
    done = runs.sandbox.run(
        ["sbatch", "--parsable", *options, str(script), *words], cwd=tmp_path, env={"HPCTRAIN_PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stderr
    run.job_id = done.stdout.strip()
    assert run.until_ended() == "COMPLETED", (tmp_path / "own.log").read_text()
    assert run.reasons == ["completed"]
    assert run.attempts[0].world_size == 2
