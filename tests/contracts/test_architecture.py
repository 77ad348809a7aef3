"""docs/explanation/architecture.md is drawn from the code: its floors, and the hops and modules of its six walks."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
HOP = re.compile(r"^\d+\. (?P<start>\*in a new process\* )?`(?P<path>[a-z_.]+(?:\.[A-Za-z_]+)+)`", re.MULTILINE)
MODULES = re.compile(r"^(?P<count>\d+) modules\.(?: Also opened on the way: (?P<also>[^;]+?)\.)?$", re.MULTILINE)
MOST = {
    "From nodes=4 to a rank": 20,
    "One step": 13,
    "A scalar to TensorBoard": 10,
    "A checkpoint to the disk and back": 14,
    "A preemption to a requeue": 21,
    "From sweep=asha to a continued run": 22,
}
"""How many modules a reader may have to open to follow each walk, helpers included."""


def module_file(path: str) -> Path | None:
    """The file of a module below the package; None if there is none."""
    module = ROOT.joinpath("hpctrain", *path.split("."))
    return next((file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file()), None)


@dataclass(frozen=True)
class Hop:
    """One call on a walk.

    Attributes:
        path: `module.function` or `module.Class.method`, below the package.
        starts_process: another process of the walk starts this one, so that it names the room and not the function.
    """

    path: str
    starts_process: bool

    @property
    def file(self) -> Path:
        """The module's file."""
        words = self.path.split(".")
        for end in range(len(words) - 1, 0, -1):
            if (file := module_file(".".join(words[:end]))) is not None:
                return file
        raise AssertionError(f"{self.path}: no such module")

    @property
    def names(self) -> list[str]:
        """The names inside of the module: function, or class and method."""
        parts = self.file.relative_to(ROOT / "hpctrain").with_suffix("").parts
        return self.path.split(".")[len(parts) - (parts[-1] == "__init__") :]


@dataclass(frozen=True)
class Walk:
    """A walk as the page has it.

    Attributes:
        hops: in order.
        helpers: files of the modules that a reader opens although no hop is in them.
        printed_count: of modules, on the page.
    """

    hops: list[Hop]
    helpers: set[Path]
    printed_count: int

    @property
    def modules(self) -> set[Path]:
        """The files of all modules."""
        return {hop.file for hop in self.hops} | self.helpers


def walk(title: str) -> Walk:
    _, heading, rest = PAGE.partition(f"### {title}\n")
    assert heading, f"architecture.md has no section {title!r}"
    section = re.split(r"^#{2,3} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    (line,) = MODULES.finditer(section)
    helpers = set()
    for path in re.findall(r"`([^`]+)`", line["also"] or ""):
        file = module_file(path)
        assert file is not None, f"{path}: no such module"
        helpers.add(file)
    hops = [Hop(match["path"], bool(match["start"])) for match in HOP.finditer(section)]
    assert len(hops) == len(re.findall(r"^\d+\. ", section, re.MULTILINE)), "a step names no function"
    return Walk(hops, helpers, int(line["count"]))


def defined(body: list[ast.stmt], names: list[str]) -> bool:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == names[0]:
            return len(names) == 1 or defined(node.body, names[1:])
    return False


@pytest.fixture(scope="module")
def floors() -> list[list[str]]:
    """import-linter's layers: the one list of rooms and modules. It is exhaustive, so that each folder is in it."""
    (layers,) = [contract["layers"] for contract in CONTRACTS if contract["type"] == "layers"]
    return [layer.split(" : ") for layer in layers]


@pytest.fixture(scope="module")
def rooms(floors) -> set[str]:
    """The folders among them."""
    return {name for floor in floors for name in floor if (ROOT / "hpctrain" / name).is_dir()}


@pytest.fixture(scope="module")
def torch_free() -> set[str]:
    """The folders that import-linter keeps from importing torch."""
    (modules,) = [contract["source_modules"] for contract in CONTRACTS if contract["type"] == "forbidden"]
    names = {module.removeprefix("hpctrain.") for module in modules}
    return {name for name in names if (ROOT / "hpctrain" / name).is_dir()}


def test_the_floors_are_those_that_import_linter_holds(floors):
    block = PAGE.partition("## Rooms and floors")[2].partition("```text\n")[2].partition("```")[0]
    assert [line.split() for line in block.splitlines()] == floors


def test_the_table_of_rooms_has_all_of_them_once(floors):
    table = PAGE.partition("| room | what it holds |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(names) == sorted(name for floor in floors for name in floor)


def test_the_two_halves_are_all_rooms(rooms, torch_free):
    section = PAGE.partition("## Two halves")[2].partition("\n## ")[0]
    login, worker = (set(words.split()) for words in re.findall(r"half\*\* \(`([^`]+)`\)", section))
    assert not login & worker
    assert login == torch_free - {"program"}
    assert worker == rooms - login - {"program", "adapters"}  # these run in a user's program


def test_the_readme_lists_all_rooms_by_half(rooms, torch_free):
    tree = (ROOT / "README.md").read_text().partition("\nhpctrain/\n")[2].partition("```")[0]
    login, _, worker = tree.partition("┘")
    assert set(re.findall(r"(\w+)/", login)) == torch_free
    assert set(re.findall(r"(\w+)/", worker)) - {"profiling"} == rooms - torch_free


@pytest.mark.parametrize("title", MOST)
def test_every_hop_exists_and_is_called_from_another_module_of_the_walk(title):
    path = walk(title)
    assert len(path.hops) > 5
    for number, hop in enumerate(path.hops):
        assert defined(ast.parse(hop.file.read_text()).body, hop.names), f"{hop.path} is not defined in {hop.file}"
        if number == 0:
            continue
        # an object that is called has the name of its class in the module that makes it
        name = hop.names[-2] if hop.names[-1] == "__call__" else hop.names[-1].lstrip("_")
        wanted = f"hpctrain.{hop.path.split('.')[0]}" if hop.starts_process else name
        others = path.modules - {hop.file}
        assert any(re.search(rf"\b_?{re.escape(wanted)}\b", file.read_text()) for file in others), hop.path


@pytest.mark.parametrize(("title", "most"), MOST.items())
def test_a_reader_opens_few_modules_to_follow_a_walk(title, most):
    path = walk(title)
    modules = sorted(str(file.relative_to(ROOT)) for file in path.modules)
    assert len(modules) <= most, modules
    assert path.printed_count == len(modules), modules
    assert not path.helpers & {hop.file for hop in path.hops}, "a helper is a hop, too"


@pytest.mark.parametrize("decision", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_has_a_status_and_names_the_modules_that_cite_it(decision):
    status = decision.read_text().partition("Status: ")[2].partition("\n\n")[0]
    modules = {ROOT / "hpctrain" / name for name in re.findall(r"`([\w/]+\.py)`", status)}
    assert status.startswith("accepted")
    assert modules
    citing = {path for path in (ROOT / "hpctrain").rglob("*.py") if f"docs/adr/{decision.name}" in path.read_text()}
    assert citing == modules
