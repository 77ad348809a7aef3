"""Attempts whose ranks are in a container, with srun and the engines replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from hpctrain.launch.containers import RankContainer
from hpctrain.run.ledger import Ledger
from hpctrain.supervise.ranks import srun_command
from tests.unit.fakes import Step, exit_record
from tests.unit.supervising import COMPLETES, STOPS, ends, story

PYXIS = ("cluster.container.image='nvcr.io#nvidia/pytorch:24.10-py3'", "cluster.container.engine=pyxis")


def test_the_whole_line_of_pyxis(supervisor):
    """Its options come before a program among the user's own, such as numactl, which then runs in the container."""
    one = supervisor(*PYXIS, "cluster.srun_args=[numactl,'--localalloc']", "cluster.container.env.A=1")
    name = one.directory.step_name
    given = {"environ": {"SLURM_JOB_ID": "7"}, "step_variables": {"HPCTRAIN_CLAIM": "1"}, "nodes": ("n1", "n2")}
    container = RankContainer.of_attempt(one.plan, 1, **given)
    command = srun_command(one.plan, job_name="digits", container=container)
    here, run = Path.cwd(), one.directory.path
    first = min(here, run, key=lambda path: len(path.parts))
    mounts = ",".join(f"{path}:{path}" for path in dict.fromkeys((first, here, run)))
    assert command[command.index("--distribution=cyclic") + 1 :] == [
        "--container-image=nvcr.io#nvidia/pytorch:24.10-py3",
        f"--container-name={name}_7_0",
        f"--container-mounts={mounts}",
        f"--container-workdir={here}",
        "--container-env=CUDA_VISIBLE_DEVICES,HPCTRAIN_CLAIM",
        *("numactl", "--localalloc"),
        *("env", "A=1", "env", "SLURM_JOB_NAME=digits", "python3", "-u", "-m", "hpctrain.train", str(run)),
    ]


def test_srun_gets_the_options_and_the_variables(slurm, supervisor):
    words, claim = slurm.home / "words", slurm.home / "claim"
    slurm.script("srun", f'echo "$@" > {words}; echo "$HPCTRAIN_CLAIM" > {claim}; exit 1')
    one = supervisor(*PYXIS, "cluster.requeue.max_failures=0")
    one.run()
    assert f"--container-name={one.directory.step_name}_7_0 " in words.read_text()
    assert "--container-env=CUDA_VISIBLE_DEVICES,HPCTRAIN_CLAIM,HPCTRAIN_LOGGED,HPCTRAIN_VERSION " in words.read_text()
    assert claim.read_text() == "1\n"


def test_an_image_that_can_not_be_used_ends_the_run(slurm, supervisor, tmp_path, capfd):
    slurm.plan(COMPLETES)
    one = supervisor(f"cluster.container.image={tmp_path}/absent", "cluster.container.engine=oci")
    assert one.run() == ExitCode.FAILED
    assert story(one) == [(0, "failed", 0, None)]
    (attempt,) = Ledger(one.directory).attempts()
    assert attempt.detail.startswith(f"cluster.container.image is not a bundle: {tmp_path}/absent/config.json: No such")
    assert attempt.detail in capfd.readouterr().err
    assert not slurm.requeued


def test_an_image_that_is_lost_after_the_ranks_have_begun_does_not_end_the_run(slurm, supervisor, tmp_path):
    image = tmp_path / "image"
    (image / "rootfs").mkdir(parents=True)
    (image / "config.json").write_text("{}")
    slurm.plan(ends("preempted", 14), COMPLETES)
    stalled = "cluster.requeue.max_stalled_attempts=9"
    words = (f"cluster.container.image={image}", "cluster.container.engine=oci", stalled)
    assert supervisor(*words).run() == ExitCode.INTERRUPTED
    image.rename(tmp_path / "away")
    again = supervisor(*words, SLURM_RESTART_COUNT="1")
    assert again.run() == ExitCode.INTERRUPTED
    last = Ledger(again.directory).attempts()[-1]
    assert last.reason is not None
    assert last.reason.value != "failed"
    assert "cluster.container.image is not a bundle" in last.detail


@pytest.mark.parametrize("word", ["cluster.python=/opt/python", None])
def test_a_container_that_can_not_be_started_ends_the_run(slurm, supervisor, word):
    exited = "srun: error: n2: task 1: Exited with exit code 255\n"
    slurm.plan(Step(exits=[exit_record(0, "interrupted", 0)], stderr=exited, exit_code=255))
    one = supervisor(
        "cluster.container.image=/images/a.sif", "cluster.container.engine=apptainer", *filter(None, [word])
    )
    one.directory.rank_log(1).write_text("FATAL:   could not open image /images/a.sif: no such file or directory\n")
    assert one.run() == ExitCode.FAILED
    (attempt,) = Ledger(one.directory).attempts()
    python = "python3" if word is None else "/opt/python"
    assert attempt.detail.startswith(f"the ranks' Python on n2, {python}, can't be started in its container (FATAL: ")
    assert not slurm.requeued


@pytest.mark.parametrize(("words", "reason"), [((), "time_limit"), (PYXIS, "preempted")])
def test_ranks_in_a_container_can_not_ask_slurm_why_they_stop(slurm, supervisor, words, reason):
    """They take a user signal for a time limit; others have asked, and SLURM's record may have changed since."""
    slurm.job(STOPS["preempted_without_grace"])
    slurm.plan(ends("time_limit", 14))
    one = supervisor(*words)
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one)[0][1] == reason
