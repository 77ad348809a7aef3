"""A program gets the values of `args` as they were typed; they stay numbers for everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.config.compose import ProgramComposer
from hpctrain.config.overrides import TextKeepingParser
from hpctrain.config.program import command_of, values_of_args
from hpctrain.config.root import flat
from hpctrain.config.stored import load_run, to_yaml
from hpctrain.errors import ConfigError
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.prepare import prepare

TEXTS = {
    "a": "1.10",
    "b": "True",
    "c": "NULL",
    "d": "1_000",
    "e": "1e3",
    "f": ".5",
    "g": "+1",
    "h": "-0",
    "i": "0.0",
    "j": "12e4567",
    "k": "12e-4567",
    "l": "007",
    "m": "0x1F",
    "n": "2024-01-05",
    "o": "yes",
    "p": "1.10.2",
}
COMMAND = ["echo", "{args.a}", "{args.list}"]


@pytest.fixture(scope="module")
def composer():
    return ProgramComposer(COMMAND)


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("args.x=1.9,1.10,null,True,[1.0,+2],a", ["1.9", "1.10", "null", "True", "[1.0,+2]", "a"]),
        ("args.x=choice(1.30)", ["1.30"]),
        ("args.x=sort(1.90,1.10)", ["1.10", "1.90"]),
        ("args.x=tag(t,choice(12e4567,'1.10'))", ["12e4567", "1.10"]),
        ("args.x=str(1.10,2)", ["1.10", "2"]),
        ("args.x=float(1,2)", ["1.0", "2.0"]),
        ("args.x=range(1,3)", ["1", "2"]),
        ("args.x='1.10',\"1\"", ["'1.10'", '"1"']),
        ("cluster.env.X=1.10,true", ["1.10", "true"]),
        ("cluster.sbatch.x=1.10,true", ["1.10", "True"]),
        ("optimizer.lr=1e-3,1.10", ["0.001", "1.1"]),
    ],
)
def test_the_values_of_a_sweep_are_written_as_they_were_typed(override, texts):
    assert list(TextKeepingParser.create().parse_override(override).sweep_string_iterator()) == texts


def test_a_program_gets_what_was_typed(composer, tmp_path):
    words = [*(f"args.{key}={text}" for key, text in TEXTS.items()), "args.list=[1.10,2]", "args.group={lr:1e-3}"]
    words += [
        "args.same=${args.a}",
        "args.inside=v${args.a}",
        "args.quoted=' 1.0 '",
        "cluster.env.V=1.10",
        "cluster.env.W=${args.same}",
    ]
    config = composer.compose_run(words)
    assert values_of_args(config) == {
        **{f"args.{key}": text for key, text in TEXTS.items()},
        "args.list": "1.10,2",
        "args.group.lr": "1e-3",
        "args.same": "1.10",
        "args.inside": "v1.10",
        "args.quoted": " 1.0 ",
    }
    assert command_of(config) == ["echo", "1.10", "1.10,2"]
    numbers = {"a": 1.1, "b": True, "c": None, "d": 1000, "e": 1000.0, "f": 0.5, "g": 1, "same": 1.1, "j": "12e4567"}
    assert {key: config.args[key] for key in numbers} == numbers
    assert config.cluster.env == {"V": "1.10", "W": "1.10"}
    assert not [key for key in flat(config) if key.startswith("run.args_as_typed")]
    (tmp_path / "config.yaml").write_text(to_yaml(replace(config, name="x")))
    assert values_of_args(load_run(tmp_path / "config.yaml")) == values_of_args(config)


def test_a_resume_takes_new_texts_with_new_values_alone(composer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = composer.compose_run(["args.a=1.10", "args.list=[+1]", "args.b=2", "run_dir=R"])
    directory = prepare(begun, []).directory
    lines: list[str] = []

    def texts(*words):
        config = prepare(changed_config(directory, words, None), [], report=lines.append).config
        return values_of_args(config)

    assert texts() == {"args.a": "1.10", "args.list": "+1", "args.b": "2"}
    assert texts("args.a=1.1", "args.list=[1]", "args.b=2.0") == {"args.a": "1.10", "args.list": "+1", "args.b": "2.0"}
    assert "args.a stays 1.10, with which the run began: 1.1 is the same value" in lines
    with pytest.raises(ConfigError, match=r"args\.a=1\.2: the run in .* has 1\.1, and the program's results depend"):
        texts("args.a=1.20")
    anyway = "resume.allow_config_change=true"
    assert texts("args.a=1.20", "args.list=[2]", anyway) == {"args.a": "1.20", "args.list": "2", "args.b": "2.0"}
    assert texts("~args.b", "args.a=1.2", anyway) == {"args.a": "1.2", "args.list": "2"}
    assert "args_as_typed" not in directory.config.read_text()


def test_a_run_of_an_earlier_version_gets_what_it_got(composer, tmp_path):
    text = to_yaml(replace(composer.compose_run(["args.a=1.1", "args.list=[true]"]), name="x"))
    assert "args_as_typed" not in text
    (tmp_path / "config.yaml").write_text(text)
    assert values_of_args(load_run(tmp_path / "config.yaml")) == {"args.a": "1.1", "args.list": "true"}


def test_the_texts_are_not_a_key(composer):
    with pytest.raises(ConfigError, match=r"is set by the values of args; write args\.NAME=VALUE"):
        composer.compose_run(["++run.args_as_typed={args.a: b}"])
