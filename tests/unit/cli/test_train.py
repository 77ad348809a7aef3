import logging
import re

import pytest

from hpctrain.cli.train import REFUSED, main
from hpctrain.errors import ConfigError


def named(text):
    return [name for names in REFUSED for name in names if name.startswith("--") and name in text]


@pytest.fixture
def root_logger_restored():
    """Hydra gives the root logger a handler for standard output, which is this test's only."""
    handlers, level = [*logging.root.handlers], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.usefixtures("root_logger_restored")
def test_what_is_refused_is_not_advertised(capsys):
    assert main(["--hydra-help"]) == 0
    out = capsys.readouterr().out
    assert "--config-dir" in out
    assert named(out) == []


def test_nor_in_the_answer_to_a_flag_that_is_unknown(capsys):
    with pytest.raises(SystemExit):
        main(["--fly"])
    assert named(capsys.readouterr().err) == []


@pytest.mark.parametrize("words", [["--cfg", "job"], ["--help", "cluster.partition"]], ids=["cfg", "help"])
def test_a_list_of_slurms_is_shown_as_a_job_would_use_it(words, capsys):
    assert main([*words, "cluster=slurm", "cluster.partition=low,high", "cluster.sbatch.mail-type=END,FAIL"]) == 0
    assert re.search(r"partition[:=] ?low,high\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["-p", "trainer"], ["# @package trainer", "max_epochs: 10"]),
        (["-p", "seed"], ["0"]),
        (["-p", "trainer.max_steps"], ["null"]),
        (["-p", "_global_"], ["seed: 0"]),
        (["--cfg", "all"], ["hydra:", "seed: 0"]),
        (["--cfg", "hydra"], ["hydra:", "  verbose: false"]),
        (["name=a", "run_dir='x/${name}'"], ["run_dir: x/${name}"]),
        (["name=a", "run_dir='x/${name}'", "--resolve"], ["run_dir: x/a"]),
    ],
)
def test_cfg_prints_a_part_of_the_configuration(words, lines, capsys):
    assert main(["--cfg", "job", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert set(lines) <= set(printed)
    assert ("seed: 0" in printed) == ("seed: 0" in lines or "name=a" in words)


def test_a_part_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"^--package=nix: is not in the configuration; name a group, such as"):
        main(["--cfg", "job", "-p", "nix"])
