import re

import pytest

from hpctrain.cli import COMMANDS, main
from hpctrain.config.root import GROUPS


def shown(capsys, *words):
    assert main(["--help", *words]) == 0
    return capsys.readouterr().out


def test_help_is_one_screen(capsys):
    text = shown(capsys)
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [
        word
        for word in (*COMMANDS, *GROUPS, "experiment", "run_dir", "args", "[run]")
        if word not in re.split(r"\s+", text)
    ] == []


def test_a_group_shows_its_options_and_the_keys_of_the_chosen_one(capsys):
    lines = shown(capsys, "cluster=slurm").splitlines()
    assert lines[0] == "cluster: Where the ranks run, and what they request from the scheduler."
    assert lines[1] == "options: local [slurm]; --help cluster=OPTION shows another"
    place = lines.index("cluster.time_limit_min=60")
    assert lines[place + 1] == "    Wall-clock bound of one attempt in minutes. (int)"
    assert "cluster.requeue.max_failures=3" in lines
    assert "cluster.partition=null" not in shown(capsys, "cluster")


def test_values_are_those_that_a_command_would_use(capsys):
    assert "optimizer.betas=[0.9,0.999]\n" in shown(capsys, "optimizer", "optimizer.lr=0.5")
    assert "optimizer.lr=0.5\n" in shown(capsys, "optimizer", "optimizer.lr=0.5")
    assert "task.data=(required)\n" in shown(capsys, "task=image_folder")


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (
            "trainer.max_steps",
            "trainer.max_steps=null\n    Optimizer updates after which the run ends; null: no limit. ",
        ),
        ("nodes", "nodes=1\n    Number of machines. (int)\n"),
        ("experiment", "options: quick; "),
        ("args", "args={}\n    Values of your own for the command"),
    ],
)
def test_a_key_and_a_group_without_keys(capsys, word, text):
    assert shown(capsys, word).startswith(text)


@pytest.mark.parametrize(("word", "remedy"), [("trainr", "did you mean trainer?"), ("xyzzy", "--help alone lists")])
def test_an_unknown_word(capsys, word, remedy):
    assert main(["--help", word]) == 2
    assert f"--help={word}: is not a group or a key; {remedy}" in capsys.readouterr().err
