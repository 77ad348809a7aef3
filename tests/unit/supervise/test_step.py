import os

from hpctrain.supervise.step import Step

KILLED = """\
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T10:58:40 ***
srun: error: n1: task 0: Exited with exit code 1
srun: Force Terminated StepId=7.0
"""
MISSPELT = "srun: unrecognized option '--nonsense'\nTry \"srun --help\" for more information\n"


def run(text, code):
    command = ["sh", "-c", 'printf %s "$TEXT" >&2; exit $CODE']
    step = Step(command, {**os.environ, "TEXT": text, "CODE": str(code)})
    assert "".join(step.run()) == text
    return step


def test_what_srun_prints_about_its_tasks_is_kept_and_passed_on(capfd):
    step = run(KILLED, 137)
    assert step.code == 137
    assert step.complaints[0] == "n2: task 1: Killed"
    assert "n1: task 0: Exited with exit code 1" in step.complaints
    assert not any("Terminat" in line for line in step.complaints)
    assert capfd.readouterr().err == KILLED


def test_why_srun_started_nothing_is_kept():
    assert run(MISSPELT, 255).complaints == ["unrecognized option '--nonsense'"]
