"""Print docs/reference/api.md: what users import or subclass, from its docstrings and signatures.

python tests/contracts/api_reference.py > docs/reference/api.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
OBJECTS = (
    "hpctrain.compose",
    "hpctrain.submit",
    "hpctrain.fit",
    "hpctrain.Run",
    "hpctrain.RunStatus",
    "hpctrain.tasks.Task",
    "hpctrain.tasks.log.TaskLog",
    "hpctrain.tasks.position.Position",
    "hpctrain.tasks.Metric",
    "hpctrain.tasks.PerSample",
    "hpctrain.tasks.classification_sums",
    "hpctrain.callbacks.Callback",
    "hpctrain.callbacks.Training",
    "hpctrain.data.BatchDataset",
    "hpctrain.data.Order",
    "hpctrain.data.WeightedOrder",
    "hpctrain.data.BucketOrder",
    "hpctrain.data.TarDataset",
    "hpctrain.data.tar_decode.decode_by_extension",
    "hpctrain.data.SeekableStream",
    "hpctrain.data.StatefulStream",
    "hpctrain.data.ShardedStream",
    "hpctrain.data.ShuffledStream",
    "hpctrain.parallel.all_gather.all_gather_with_grad",
    "hpctrain.parallel.tensor_parallel.FusedColumnwise",
    "hpctrain.models.keras_module.KerasModule",
    "hpctrain.models.keras_module.import_keras",
)
HEAD = """# API

What your own code imports or subclasses. Everything else in the package may change without notice. This page is
generated: `python tests/contracts/api_reference.py > docs/reference/api.md`.
"""
TITLES = {
    griffe.DocstringSectionKind.parameters: "Args",
    griffe.DocstringSectionKind.attributes: "Attributes",
    griffe.DocstringSectionKind.returns: "Returns",
    griffe.DocstringSectionKind.raises: "Raises",
}


def reference() -> str:
    """The page, as Markdown."""
    package = griffe.load("hpctrain", search_paths=[ROOT], docstring_parser="google")
    assert isinstance(package, griffe.Module)
    lines = [HEAD]
    for path in OBJECTS:
        found = package[path.removeprefix("hpctrain.")]
        lines.extend(_entry(found.final_target if found.is_alias else found, path, "##"))
    return "\n".join(lines)


def _entry(found: griffe.Object, path: str, level: str) -> Iterator[str]:
    """A heading, the signature, and the docstring; then the public members of a class."""
    yield f"{level} `{path}`\n"
    if isinstance(found, griffe.Class):
        constructor = found.members.get("__init__")
        if isinstance(constructor, griffe.Function):
            yield f"```text\n{_signature(constructor, found.name)}\n```\n"
    elif isinstance(found, griffe.Function):
        yield f"```text\n{_signature(found, found.name)}\n```\n"
    yield from _docstring(found)
    if isinstance(found, griffe.Class):
        for name, member in found.members.items():
            special = name == "__call__" or (name == "__len__" and "Protocol" in map(str, found.bases))
            if isinstance(member, griffe.Function) and (special or not name.startswith("_")):
                yield from _entry(member, f"{found.name}.{name}", "###")
            elif isinstance(member, griffe.Attribute) and "property" in member.labels and not name.startswith("_"):
                yield f"### `{found.name}.{name}`: `{member.annotation}`\n"
                yield from _docstring(member)


def _signature(function: griffe.Function, name: str) -> str:
    """The signature as it stands in the source, without `self`."""
    parameters = [one for one in function.parameters if one.name not in ("self", "cls")]
    words = []
    for one in parameters:
        if one.kind is griffe.ParameterKind.keyword_only and "*" not in " ".join(words):
            words.append("*")
        prefix = {"variadic positional": "*", "variadic keyword": "**"}.get(one.kind.value if one.kind else "", "")
        annotation = f": {one.annotation}" if one.annotation is not None else ""
        default = f" = {one.default}" if one.default is not None and not prefix else ""
        words.append(f"{prefix}{one.name}{annotation}{default}")
    returns = f" -> {function.returns}" if function.returns is not None and name != "__init__" else ""
    return f"{name}({', '.join(words)}){returns}"


def _docstring(found: griffe.Object) -> Iterator[str]:
    if found.docstring is None:
        return
    for section in found.docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.text:
            yield f"{section.value}\n"
        elif section.kind is griffe.DocstringSectionKind.examples:
            yield "\n".join(text for _, text in section.value) + "\n"
        elif section.kind is griffe.DocstringSectionKind.admonition:
            yield f"**{section.title}:** {section.value.description}\n"
        else:
            yield f"{TITLES[section.kind]}:\n"
            for one in section.value:
                name = getattr(one, "name", "") or ""
                kind = section.kind
                label = str(one.annotation) if kind is griffe.DocstringSectionKind.raises else name
                text = " ".join(one.description.split())
                yield f"- `{label}`: {text}" if label else f"- {text}"
            yield ""


if __name__ == "__main__":
    sys.stdout.write(reference())
