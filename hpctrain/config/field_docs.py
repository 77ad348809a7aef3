"""The keys of the schema with their documentation, which are the docstrings below the fields of its dataclasses."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One documented key.

    Attributes:
        name: without its group.
        type: as annotated, without its checks.
        default: as written in YAML.
        text: its meaning, with its unit.
    """

    name: str
    type: str
    default: str
    text: str


def own_fields(schema: type) -> Iterator[FieldDoc]:
    """Yield the keys that a schema class declares itself."""
    tree = ast.parse(inspect.getsource(schema)).body[0]
    assert isinstance(tree, ast.ClassDef)
    constants = vars(sys.modules[schema.__module__])
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            text = " ".join(str(after.value.value).split())
            yield FieldDoc(node.target.id, _type(node.annotation), _default(node.value, constants), text)


def all_fields(schema: type) -> dict[str, FieldDoc]:
    """Return the documented keys of a schema class by name, inherited ones included."""
    bases = [base for base in reversed(schema.__mro__) if is_dataclass(base)]
    return {field.name: field for base in bases for field in own_fields(base)}


def purpose_of(schema: type) -> str:
    """Return the purpose of a group: what its schema module's docstring says after the colon."""
    module = inspect.getmodule(schema)
    assert module is not None
    text = " ".join((module.__doc__ or "").split()).partition(": ")[2]
    return f"{text[:1].upper()}{text[1:]}".replace("``", "`")


def _type(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]
    return ast.unparse(annotation).replace("None", "null")


def _default(value: ast.expr, constants: Mapping[str, object]) -> str:
    text = str(constants[value.id]) if isinstance(value, ast.Name) else ast.unparse(value)
    if text.startswith("field(default_factory="):
        inner = text.removeprefix("field(default_factory=").removesuffix(")")
        text = {"dict": "{}", "list": "[]"}.get(inner, inner.removeprefix("lambda: "))
    return {"None": "null", "True": "true", "False": "false"}.get(text, text.strip("'"))
