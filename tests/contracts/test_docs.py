"""The documentation holds: links lead somewhere, commands run as written, keys and flags exist."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hpctrain.api.run import Run
from hpctrain.cli import COMMANDS, main
from hpctrain.config.cluster import Container, Requeue
from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.config.logger import MLflow, Wandb
from hpctrain.config.program import split_command
from hpctrain.config.root import GROUPS, LIST_GROUPS
from hpctrain.errors import ExitCode
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import EndFacts, StartFacts
from hpctrain.run.manifest import manifest
from hpctrain.run.reason import Reason
from hpctrain.run.times import TimesRecord
from hpctrain.status.state import RunState
from hpctrain.tasks.make_tokens import main as make_tokens

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "slurm").rglob("*.md"))]
EXAMPLE = "runs/digits/2026-01-31_12-00-00"
"""A run that is there on every page, also as RUN."""
SHORT = ["trainer.max_steps=2", "logger.tensorboard=false", "cluster.cpus_per_process=1"]
SHAPING = (
    *("task=", "task._target_=", "experiment=", "model=", "cluster.processes_per_node=", "init_from="),
    *("checkpoint.safetensors=", "trainer.profile=", "trainer.activation_checkpointing=", "--config-dir", "-m"),
)
"""Beginnings of words that decide which code a training runs."""
SHOWS = {"--help", "-h", "--cfg", "--version"}
MAKE_TOKENS = "hpctrain.tasks.make_tokens"
READ_FIRST = ("README.md", *(f"docs/tutorial/{name}.md" for name in ("first_run", "first_slurm_run", "your_own_task")))
REMARKS = ("norun", "nightly")
"""First words of a remark after a block's language, where others have the name of a file."""
FILES = {"pt", "safetensors", "py", "md", "yaml", "json", "jsonl"}


@dataclass(frozen=True)
class Block:
    """A fenced block: the text after the opening fence, and the text between the fences."""

    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def more(self) -> str:
        return self.info.partition(" ")[2].strip()


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(info.strip(), text) for info, text in found]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def shell_commands(page: Path, *, nightly: bool = True) -> list[list[str]]:
    """Every command of the page's bash blocks that runs, as words; those of blocks marked as nightly only then."""
    left_out = ("norun",) if nightly else REMARKS
    found = []
    for block in blocks(page):
        if block.language == "bash" and not block.more.startswith(left_out):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.replace('"$HOME/', f'"{Path.home()}/'), comments=True)
                while "&&" in words:
                    found.append(words[: words.index("&&")])
                    words = words[words.index("&&") + 1 :]
                found.append(words)
    return [words for words in found if words]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(linked), re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)]+)\)", prose(index))
    }
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - linked == {index}


@each_page
def test_what_does_not_run_says_why(page):
    for block in blocks(page):
        assert not block.more.startswith(REMARKS) or re.match(r"\w+: \w", block.more), block.info


@each_page
def test_python_blocks_are_python(page):
    for block in blocks(page):
        if block.language == "python":
            ast.parse(textwrap.dedent(block.text))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A short run that reached its end."""
    run = tmp_path_factory.mktemp("example") / "run"
    threads = torch.get_num_threads()
    assert hpctrain([f"run_dir={run}", "code.snapshot=none", *SHORT]) == 0
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def folder(page, finished_run, tmp_path, monkeypatch):
    """Where a reader of the page types: with the files that it shows, and the run that its commands name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("SLURM_JOB_ID", "SLURM_CONF", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    for block in blocks(page):
        if block.more and not block.more.startswith(REMARKS):
            path = tmp_path / block.more
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    shutil.copytree(finished_run, tmp_path / EXAMPLE, symlinks=True)
    yield tmp_path
    for module in [path.stem for path in tmp_path.glob("*.py")]:
        sys.modules.pop(module, None)


def hpctrain(words: list[str]) -> int:
    """Run the command in this process, and close the run's log as the end of a process of its own would."""
    try:
        return main(words)
    finally:
        logger = logging.getLogger("hpctrain")
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "name", "").endswith(".log"):
                handler.stream.close()


def in_a_process(words: list[str]) -> int:
    """Run it in a process of its own: each run of a sweep leaves a log open until the process ends."""
    return subprocess.run([sys.executable, "-m", "hpctrain", *words], check=False).returncode


def shape(words: list[str]) -> frozenset[str]:
    """Trainings of one shape run the same code."""
    return frozenset(word for word in words if word.startswith(SHAPING))


class Reader:
    """Types a page's commands, in order, in a form that is quick.

    Args:
        folder: where the commands are typed.
        finished_run: stands in for runs that commands would have made.
        trained: shapes of trainings that have run: another of these is composed only. None: all run.
    """

    def __init__(self, folder: Path, finished_run: Path, trained: set[frozenset[str]] | None) -> None:
        self.folder = folder
        self.finished_run = finished_run
        self.trained = trained

    def type(self, command: list[str]) -> int:
        words = [re.sub(r"(^|=)RUN$", rf"\1{EXAMPLE}", word) for word in command]
        if words[:2] == ["python", "slurm/sandbox"]:
            return int(words[2] not in sandbox_commands())
        if words[0] == "python" and ((self.folder / words[1]).is_file() or MAKE_TOKENS in words):
            return self.run(words[1:])
        if words[0] == "sbatch":
            script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
            assert (ROOT / words[script]).is_file()
            given, command = split_command(words[script + 1 :])
            return self.plan_program(["run", *given, "--", *command]) if command else self.compose(given)
        if words[-1] == "hpctrain" or "hpctrain" not in words or words[words.index("hpctrain") - 1] != "-m":
            return self.start([]) if words[-2:] == ["-m", "hpctrain"] else 0
        before, after = words[: words.index("hpctrain") - 1], words[words.index("hpctrain") + 1 :]
        if before[0] in ("srun", "torchrun") and after[0] not in COMMANDS:
            return self.compose(after)
        return self.plan_program(after) if "--" in after else self.start(after)

    def run(self, words: list[str]) -> int:
        """A script that the page shows, or the program that makes token files."""
        if words[:2] == ["-m", MAKE_TOKENS]:
            return make_tokens(words[2:])
        with patch.object(sys, "argv", words):
            runpy.run_path(words[0], run_name="__main__")
        return 0

    def compose(self, overrides: list[str]) -> int:
        Composer().compose(overrides)
        return 0

    def plan_program(self, words: list[str]) -> int:
        """A command of `run` or `drill run`: the program is the reader's own."""
        for script in (word for word in words if word.endswith((".py", ".sh"))):
            self.folder.joinpath(script).touch()
        if words[0] == "run":
            return hpctrain(["run", "cluster.dry_run=true", *words[1:]])
        overrides, command = split_command(words[2:])
        ProgramComposer(command).compose_run([word for word in overrides if "=" in word])
        return 0

    def start(self, words: list[str]) -> int:
        elsewhere = any(re.match(r"cluster=(?!local)|cluster\.processes_per_node=", word) for word in words)
        if words[:1] == ["resume"]:
            return hpctrain([*words, *(["cluster.dry_run=true"] if elsewhere else [])])
        if words[:1] == ["fit-batch"]:
            # each size is a process that imports torch
            return hpctrain([*words, "--largest", "1"])
        if (words and words[0] in COMMANDS) or SHOWS & set(words):
            return hpctrain(words)
        if not elsewhere and self.trained is not None:
            if shape(words) in self.trained:
                self.stand_in(words)
                sweeps = "-m" in words
                return hpctrain([*words, *SHORT, "cluster.dry_run=true"]) if sweeps else self.compose([*words, *SHORT])
            self.trained.add(shape(words))
        if not elsewhere:
            return (in_a_process if "-m" in words else hpctrain)([*words, *SHORT])
        self.stand_in(words)
        return hpctrain([*words, "cluster.dry_run=true"])

    def stand_in(self, words: list[str]) -> None:
        """Copy a run to where the command would have made one, for the commands that follow."""
        for word in words:
            if word.startswith("run_dir="):
                run = self.folder / word.partition("=")[2]
                shutil.copytree(
                    self.finished_run, run / "0" if "-m" in words else run, symlinks=True, dirs_exist_ok=True
                )


def sandbox_commands() -> str:
    program = [sys.executable, str(ROOT / "slurm" / "sandbox"), "--help"]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout


def typed(page: Path) -> bool:
    return any("hpctrain" in word or "sandbox" in word for words in shell_commands(page) for word in words)


@pytest.fixture(scope="module")
def trained():
    """Shapes of trainings that have run, over all pages."""
    return set()


def typed_pages() -> list[Any]:
    """Return the pages with commands.

    The gate has the pages that are read first, and runs one training of each shape; the nightly tests run every command
    of every page.
    """
    pages = [page for page in PAGES if typed(page)]
    first = [page for page in pages if name_of(page) in READ_FIRST]
    gate = [pytest.param(page, False, id=name_of(page)) for page in first]
    return gate + [pytest.param(page, True, id=f"every-{name_of(page)}", marks=pytest.mark.nightly) for page in pages]


@pytest.mark.parametrize(("page", "every"), typed_pages())
def test_commands_run_as_written(page, every, folder, finished_run, trained, capfd):
    reader = Reader(folder, finished_run, None if every else trained)
    for command in shell_commands(page, nightly=every):
        code = reader.type(command)
        printed = capfd.readouterr()
        assert code == 0, f"{shlex.join(command)}\n{printed.out}\n{printed.err}"


@pytest.mark.parametrize("page", [ROOT / "docs" / "cheat_sheet.md"], ids=["cheat_sheet"])
def test_the_trainings_of_the_cheat_sheet_can_be_launched(page, folder, finished_run):
    table = page.read_text().partition("## Train\n")[2].partition("\n## ")[0]
    own_task = (
        "from hpctrain.tasks.digits import Digits\n\nclass MyTask(Digits):\n    def __init__(self, width: int): ...\n"
    )
    (folder / "my_project.py").write_text(own_task)
    reader = Reader(folder, finished_run, None)
    commands = re.findall(r"`python -m hpctrain ([^`]+)`", table)
    assert len(commands) > 8
    for command in commands:
        words = [re.sub(r"(^|=)RUN$", rf"\1{EXAMPLE}", word) for word in shlex.split(command)]
        if "--" in words:
            assert reader.plan_program(words) == 0, command
        else:
            assert hpctrain([*words, *([] if SHOWS & set(words) else ["cluster.dry_run=true"])]) == 0, command


def test_the_tutorials_task_learns(tmp_path, monkeypatch, capfd):
    page = ROOT / "docs" / "tutorial" / "your_own_task.md"
    (task,) = [block for block in blocks(page) if block.more == "sine.py"]
    assert task.text.count("\n") <= 30
    (tmp_path / "sine.py").write_text(task.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert hpctrain(["task=custom", "task._target_=sine.Sine", "trainer.max_epochs=2", *SHORT[1:]]) == 0
    losses = re.findall(r"eval/loss (\S+)", capfd.readouterr().out)
    sys.modules.pop("sine")
    assert float(losses[-1]) < 0.05


def known_keys() -> set[str]:
    keys = {
        f"{made.prefix}{field.name}"
        for made in (Requeue, Container, Wandb, MLflow)
        for field in dataclasses.fields(made)
    }
    for group, schemas in GROUPS.items():
        for name, made in schemas.items():
            entry = f"{group}.{name}" if group in LIST_GROUPS else group
            keys |= {f"{entry}.{field.name}" for field in dataclasses.fields(made)} | {entry}
    return keys


@each_page
def test_every_key_that_is_mentioned_exists(page):
    groups = "|".join(GROUPS)
    text = prose(page) + "".join(block.text for block in blocks(page) if block.language == "bash")
    if page.name.startswith("from_"):
        # the left column of these pages is other programs' code
        text = re.sub(r"^\|.*?\|", "|", text, flags=re.MULTILINE)
    programs = [block.text for block in blocks(page) if block.more.endswith(".py")]
    programs += [path.read_text() for path in page.parent.glob("*.py")]
    own = set(re.findall(r"(\w+): \w+(?: =|,)", "".join(programs)))
    known = known_keys() | {f"task.{name}" for name in own}
    for key in re.findall(rf"(?<![\w./-])((?:{groups})\.[a-z0-9_]+(?:\.[a-z0-9_-]+)*)", text):
        invented = key.startswith(
            ("cluster.env.", "cluster.container.env.", "cluster.sbatch.", "optimizer.named.", "logger.mlflow.tags.")
        )
        # the walks of that page name functions, and some rooms have the names of groups
        module = ROOT.joinpath("hpctrain", *key.split(".")[:2]).with_suffix(".py")
        is_code = page.name == "architecture.md" and module.is_file()
        # a name of tensors
        is_code |= page.name == "checkpoint_format.md" and key.startswith("optimizer.state")
        # a variable `run`, which is a Run
        is_code |= key.startswith("run.") and hasattr(Run, key.split(".")[1])
        assert key in known or invented or is_code or key.rpartition(".")[2] in FILES or f"+{key}" in text, key


@pytest.mark.parametrize("command", [*COMMANDS, "drill run"])
def test_every_command_is_in_the_reference_with_its_flags(command, capsys):
    sections = re.split(r"^### ", (ROOT / "docs" / "reference" / "command_line.md").read_text(), flags=re.MULTILINE)
    named = re.compile(rf"{command}(?![a-z -]*[a-z])")
    (section,) = [text.partition("\n## ")[0] for text in sections if named.match(text)]
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    options = capsys.readouterr().out.partition("\noptions:")[2].partition("\n\n")[0]
    flags = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", options, re.MULTILINE)) - {"--help"}
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `-")]
    assert set(re.findall(r"--[a-z-]+", " ".join(rows))) == flags | ({"--help"} & set(rows))


def _field_names(*records):
    return [field.name for record in records for field in dataclasses.fields(record)]


@pytest.mark.parametrize(
    ("page", "words"),
    {
        "command_line": [*(str(code.value) for code in ExitCode), *RunState],
        "run_directory": [*Reason, *_field_names(ExitRecord, StartFacts, EndFacts, TimesRecord), *manifest([], ROOT)],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reference_names_them_all(page, words):
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    tables = " ".join(line for line in text.splitlines() if line.startswith("|"))
    assert [word for word in words if not re.search(rf"(?<![\w/]){re.escape(word)}(?!\w)", tables)] == []
