"""Tab completes commands, groups, keys and runs, in the shells themselves."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli import COMMANDS, main
from hpctrain.cli.completion import candidates
from hpctrain.config.compose import Composer
from hpctrain.config.paths import conf_dir, keys_of, options_of

BASH = """
source <(hpctrain completion bash)
complete -p hpctrain >/dev/null || exit 1
COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}
read -ra COMP_WORDS <<< "$COMP_LINE"; COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_hpctrain hpctrain {current} previous
printf '[%s]' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ completer=$1 }}
source <(hpctrain completion zsh)
compadd() {{ shift 4; printf '[%s]' "$@" }}
_files() {{ print files }}
words=({words}); CURRENT=$#words; PREFIX=$words[-1]
$completer
"""
# a shell would execute or expand them
HOSTILE = ("x;touch pwned", "y$(id)", "z`id`", "a&b", "c\nd", "*")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs and others of hostile names, an option in ./conf, and the command on the PATH."""
    for name in ("digits/2026-01-31_12-00-00", "text/mine", *HOSTILE):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "site.yaml").write_text("defaults:\n  - slurm\n  - _self_\n")
    command = tmp_path / "bin" / "hpctrain"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom hpctrain.__main__ import main\nsys.exit(main())\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(shell: str, program: str) -> str:
    return subprocess.run([shell, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hpctrain sta", "[stacks ][status ]"),
        ("hpctrain opt", "[optimizer.][optimizer=]"),
        ("hpctrain -m optimizer=a", "[adamw ]"),
        ("hpctrain cluster=", "[local ][site ][slurm ]"),
        ("hpctrain cluster=site cluster.part", "[cluster.partition=]"),
        ("hpctrain resume runs/d", "[runs/digits/2026-01-31_12-00-00 ]"),
        ("hpctrain logs ", "[runs/digits/2026-01-31_12-00-00 ][runs/text/mine ]"),
        ("hpctrain --config-dir ", "[]"),
        ("hpctrain zzz", "[]"),
    ],
)
def test_bash(line: str, expected: str, here: Path) -> None:
    for name in HOSTILE:
        (here / "conf" / "cluster" / f"{name}.yaml").touch()
    current = line.rpartition(" ")[2].rpartition("=")[2]  # as readline, for which = ends a word
    assert typed("bash", BASH.format(line=shlex.quote(line), current=shlex.quote(current))) == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh isn't installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hpctrain sta", "[stacks ][status ]"),
        ("hpctrain -m optimizer=a", "[optimizer=adamw ]"),
        ("hpctrain logs ", "[runs/digits/2026-01-31_12-00-00 ][runs/text/mine ]"),
        ("hpctrain zzz", "files\n"),
    ],
)
def test_zsh(line: str, expected: str) -> None:
    assert typed("zsh", ZSH.format(words=" ".join(shlex.quote(word) for word in line.split(" ")))) == expected


def test_the_first_word_is_a_command_a_group_or_a_key() -> None:
    found = candidates([""])
    assert {f"{command} " for command in COMMANDS} <= set(found)
    assert {"cluster=", "cluster.", "experiment=", "nodes=", "run_dir="} <= set(found)
    assert not [name for name in found if "base_" in name or "hydra" in name]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cluster.part"], []),
        (["cluster=slurm", "cluster.part"], ["cluster.partition="]),
        (["cluster=slurm", "cluster.requeue.max_p"], ["cluster.requeue.max_preemptions="]),
        (["resume", "RUN", "cluster=slurm", "cluster.part"], ["cluster.partition="]),
        (["drill", "trainer.max_s"], ["trainer.max_steps="]),
        (["model=gpt2_large", "model.num_"], ["model.num_heads=", "model.num_layers="]),
        (["~optimizer.ep"], ["~optimizer.eps="]),
        (["status", "trainer."], []),
        (["--ver"], ["--version "]),
        (["--runs-dir", "x"], []),
        (["status", "--runs-dir", "runs/text", ""], ["runs/text/mine "]),
        (["completion", ""], ["bash ", "zsh "]),
        (["no_group."], []),
        (["callbacks=e"], ["callbacks=early_stopping "]),
        (["callbacks=[early_stopping,log_t"], ["callbacks=[early_stopping,log_text"]),
        (
            ["callbacks=[early_stopping,log_text]", "callbacks.early_stopping.pat"],
            ["callbacks.early_stopping.patience="],
        ),
    ],
)
def test_keys_are_those_of_the_choices_before(words: list[str], expected: list[str]) -> None:
    assert candidates(words) == expected


def test_an_option_of_ones_own_has_its_keys(here: Path) -> None:
    (here / "conf" / "task").mkdir()
    (here / "conf" / "task" / "sine.yaml").write_text("_target_: sine.Sine\nnum_points: 4096\n")
    assert candidates(["task=sine", "task.n"]) == ["task.num_points="]


@pytest.mark.parametrize(
    "group",
    [
        "cluster",
        "schedule",
        *(pytest.param(group, marks=pytest.mark.nightly) for group in ("model", "optimizer", "task")),
    ],
)
def test_what_is_offered_is_what_composing_finds(group: str, here: Path) -> None:
    composer = Composer()
    folders = [conf_dir(), here / "conf"]
    assert options_of(group, folders) == sorted(composer.options.of(group))
    for option in options_of(group, folders):
        needed = {"image_folder": ["task.data=."], "tokens": ["task.data=."], "custom": [f"{group}._target_=a.B"]}
        node = composer._compose_node([f"{group}={option}", *needed.get(option, [])])
        composed = {f"{group}.{name}" for name in node[group]} - {"cluster.kind"}
        offered = {".".join(key.split(".")[:2]) for key in keys_of(group, option, folders)}
        assert offered == composed, option


def test_it_is_quick(here: Path) -> None:
    def once() -> float:
        before = os.times()
        subprocess.run(["hpctrain", "completion", "query", "trainer."], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    # seconds of a core: others use this machine, too
    assert min(once() for _ in range(3)) < 0.4


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    assert "choose from" in capsys.readouterr().err
