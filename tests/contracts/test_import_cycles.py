"""No module of the package imports itself by way of others; imports inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpctrain

ROOT = Path(hpctrain.__file__).parent


def module_name(path: Path) -> str:
    parts = ("hpctrain", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The modules of the package that a file imports anywhere: at its top, in a function, or for its types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & known
            if names - known:
                yield str(node.module)


def graph_of(files: dict[str, str]) -> dict[str, set[str]]:
    """What each module imports.

    Args:
        files: source text by module name.
    """
    return {name: set(imported(ast.parse(text), {*files})) - {name} for name, text in files.items()}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, SIAM J. Comput. 1, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def test_no_module_imports_itself_by_way_of_others():
    files = {module_name(path): path.read_text() for path in ROOT.rglob("*.py")}
    assert len(files) > 100
    assert cycles(graph_of(files)) == []


def test_an_import_inside_a_function_closes_a_cycle():
    lazily = "def later():\n    from a import c\n    from a.c import x\n"
    files = {"a": "", "a.b": lazily, "a.c": "import a.d\n", "a.d": "from a.b import y\n", "a.e": "import a.b\n"}
    assert cycles(graph_of(files)) == [["a.b", "a.c", "a.d"]]


def test_a_type_checking_import_closes_a_cycle():
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.c import x\n"
    assert cycles(graph_of({"a.b": typed, "a.c": "from a.b import x\n"})) == [["a.b", "a.c"]]
