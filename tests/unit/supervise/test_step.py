import os

from hpctrain.supervise.step import run_step

KILLED = """\
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T10:58:40 ***
srun: error: n1: task 0: Exited with exit code 1
srun: Force Terminated StepId=7.0
"""
MISSPELT = "srun: unrecognized option '--nonsense'\nTry \"srun --help\" for more information\n"


def said(text, code):
    return run_step(["sh", "-c", 'printf %s "$TOLD" >&2; exit $CODE'], {**os.environ, "TOLD": text, "CODE": str(code)})


def test_what_srun_says_of_its_tasks_is_kept_and_passed_on(capfd):
    end = said(KILLED, 137)
    assert end.code == 137
    assert end.said[0] == "n2: task 1: Killed"
    assert "n1: task 0: Exited with exit code 1" in end.said
    assert not any("Terminat" in line for line in end.said)
    assert capfd.readouterr().err == KILLED


def test_why_srun_started_nothing_is_kept():
    assert said(MISSPELT, 255).said == ("unrecognized option '--nonsense'",)
