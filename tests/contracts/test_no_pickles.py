"""hpctrain's own code unpickles nothing that another process, or a checkpoint, could have written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpctrain"
UNPICKLE = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
"""Functions of torch.distributed."""
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "multiprocessing.connection"}
ALLOWED = {"UnpicklingError"}
"""An exception of torch.load(weights_only=True)."""
COPIES = {"config/compose.py"}
"""Modules that copy an object of their own process by a pickle in memory."""
RESTRICTED = {
    "checkpoint/restricted_pickle.py": {
        *("pickle._Unpickler", "pickle.REDUCE", "pickle.NEWOBJ", "pickle.NEWOBJ_EX", "pickle.BUILD"),
        "pickle.BYTEARRAY8",
        "torch.load without weights_only=True",
    },
    # writes the description of a sharded checkpoint for torch.distributed.checkpoint, which has no other form of it
    "checkpoint/sharded/chunk_file.py": {"pickle.dumps"},
}
"""What some modules use. The unpickler for saves replaces each of these instructions: see test_restricted_pickle.py."""


def uses(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=module, names=names) if module in MODULES:
                yield from (f"{module}.{name.name}" for name in names if name.name not in ALLOWED)
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in UNPICKLE:
                yield name
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in MODULES and name not in ALLOWED:
                yield f"{module}.{name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in keywords)
                if not safe:
                    yield "torch.load without weights_only=True"


def test_nothing_is_unpickled() -> None:
    found = {str(path.relative_to(PACKAGE)): list(uses(path.read_text())) for path in PACKAGE.rglob("*.py")}
    for path, allowed in RESTRICTED.items():
        assert set(found.pop(path)) == allowed
    assert {path: use for path, use in found.items() if use and path not in COPIES} == {}


@pytest.mark.parametrize(
    "source",
    [
        "dist.gather_object(1)",
        "pickle.load(f)",
        "from pickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
    ],
)
def test_what_the_check_finds(source: str) -> None:
    assert len(list(uses(source))) == 1
