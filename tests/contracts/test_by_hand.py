"""The shipped batch scripts have every line that the page on your own batch scripts requires."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "environment.md").read_text()
SCRIPTS = {name: (ROOT / "slurm" / name).read_text() for name in ("train.sbatch", "program.sbatch", "torchrun.sbatch")}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_line_that_a_script_of_ones_own_needs_is_in_the_shipped_ones(script):
    needed = PAGE.partition("A script of your own must do the same:")[2].partition("The output of the ranks")[0]
    flags = [flag for code in re.findall(r"`([^`]+)`", needed) for flag in re.findall(r"--[^ ]+", code)]
    assert flags == ["--signal=USR2@90", "--requeue", "--open-mode=append"]
    assert not [flag for flag in flags if f"#SBATCH {flag}\n" not in SCRIPTS[script]]
    assert ("`trap '' TERM USR1 USR2`" in needed, "`python -m hpctrain.supervise KEY=VALUE ...`" in needed) == (
        True,
        True,
    )
    assert "\ntrap '' TERM USR1 USR2\n" in SCRIPTS[script]
    command = r'"\$\{HPCTRAIN_PYTHON:-python\}" -m hpctrain\.supervise .*"\$@"'
    loop = rf"\nfor .*\n    {command} && code=0 \|\| code=\$\?\n.*\ndone\n$"
    assert re.search(loop, SCRIPTS[script], re.DOTALL)


def test_what_srun_and_torchrun_need_is_on_the_page():
    bare = PAGE.partition("## Start ranks by hand")[2]
    for needed in (
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--cpus-per-task",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ):
        assert needed in bare
