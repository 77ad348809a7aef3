from __future__ import annotations

import sys

import pytest

from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.launch.prepare import plan

IN_CONTAINER = ["cluster=slurm", "cluster.container.image=/images/torch.sif", "cluster.container.engine=apptainer"]


@pytest.mark.parametrize("composer", [Composer(), ProgramComposer(["true"])], ids=["training", "program"])
@pytest.mark.parametrize(
    ("words", "python"),
    [
        ([], sys.executable),
        (["cluster=slurm"], sys.executable),
        (["cluster=slurm", "cluster.python=/opt/venv/bin/python"], "/opt/venv/bin/python"),
        (["cluster=slurm", "cluster.python=python3.12"], "python3.12"),
        (IN_CONTAINER, "python3"),
        ([*IN_CONTAINER, "cluster.python=/opt/conda/bin/python"], "/opt/conda/bin/python"),
    ],
)
def test_the_python_of_the_ranks(composer, words, python):
    run = plan(composer.compose_run(["run_dir=/runs/R", *words]))
    module = "hpctrain.program" if run.is_program else "hpctrain.train"
    assert run.rank_command(None) == [python, "-u", "-m", module]
