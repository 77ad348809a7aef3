"""One command of SLURM, as a program: what is passed to it, and what each of its failures means."""

from __future__ import annotations

import pytest

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler.command import SchedulerSilentError, UnknownJobError, run


def test_its_output_is_returned_and_its_input_is_empty(slurm):
    slurm.script("squeue", "cat; echo $*; echo more >&2")
    assert run(["squeue", "--jobs=7", "--noheader"], slurm.environ, 5) == "--jobs=7 --noheader\n"


def test_output_that_is_not_text_is_no_error(slurm):
    slurm.script("squeue", "printf 'caf\\351'")
    assert run(["squeue"], slurm.environ, 5) == "caf\ufffd"


def test_a_users_settings_are_kept_away_and_the_language_is_fixed(slurm):
    slurm.script("squeue", "env")
    own = {"SQUEUE_STATES": "FAILED", "SCANCEL_INTERACTIVE": "1", "LC_ALL": "de_DE.UTF-8", "SLURM_CONF": "x"}
    printed = run(["squeue"], slurm.environ | own, 5)
    variables = dict(line.split("=", 1) for line in printed.splitlines())
    assert not {"SQUEUE_STATES", "SCANCEL_INTERACTIVE"} & set(variables)
    assert (variables["LC_ALL"], variables["SLURM_TIME_FORMAT"], variables["SLURM_CONF"]) == ("C", "%s", "x")


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("kill -TERM $$", SchedulerSilentError, "ended by SIGTERM, without an answer"),
        ("echo 'Zero Bytes were transmitted or received' >&2; exit 1", SchedulerSilentError, "Zero Bytes were"),
        ("echo 'Requeue request failed: Message receive failure' >&2; exit 1", SchedulerSilentError, "Requeue request"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", SchedulerSilentError, "Slurm accounting storage"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", UnknownJobError, "slurm_load_jobs"),
        ("echo 'Job 7 not found'; exit 1", UnknownJobError, "Job 7 not found"),
        ("echo 'Access/permission\n denied' >&2; exit 1", SchedulerError, "Access/permission denied"),
        ("exit 3", SchedulerError, "exit code 3"),
    ],
)
def test_a_failure_is_silence_an_unknown_job_or_a_refusal(slurm, script, kind, message):
    slurm.script("scontrol", script)
    with pytest.raises(SchedulerError) as caught:
        run(["scontrol", "--oneliner", "show", "job", "7"], slurm.environ, 5)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"scontrol show job 7: {message}")


def test_a_command_that_does_not_end_is_silent(slurm):
    slurm.script("sacct", "exec sleep 60")
    with pytest.raises(SchedulerSilentError, match=r"^sacct --jobs=7: SLURM did not answer within 0\.2 s"):
        run(["sacct", "--parsable2", "--jobs=7"], slurm.environ, 0.2)


def test_a_command_that_is_not_installed_says_what_to_do(tmp_path):
    with pytest.raises(SchedulerMissingError, match=r"squeue in PATH: No such file.*login node") as caught:
        run(["squeue"], {"PATH": str(tmp_path)}, 5)
    assert not isinstance(caught.value, SchedulerSilentError)
