"""hpctrain trains PyTorch models on this machine or on a SLURM cluster.
  python -m hpctrain                              train task=digits here
  python -m hpctrain cluster=slurm nodes=4        the same on four nodes
  python -m hpctrain -m optimizer.lr=1e-3,3e-4    a sweep: one run per value
  python -m hpctrain run -- python my.py          any program, as the ranks
  python -m hpctrain COMMAND ...                  each COMMAND has --help:
    status [RUN]  runs under runs/, or one    resume RUN   continue what stopped
    logs RUN      what a rank printed         cancel RUN   cancel or stop a run
    inspect RUN   its checkpoints             stacks RUN   stacks of its ranks
    fit-batch     the largest micro-batch     drill [run]  test interruptions
    env           rank and world size here    completion   Tab in your shell
    sync RUN      send it to W&B or MLflow    report RUN   a page to look at
    best SWEEP    its runs, best first        compare A B  how two runs differ
    top [FOLDER]  many runs, live             export RUN   weights as a file
    doctor        will runs work on this machine or cluster?
KEY=VALUE changes a key, and GROUP=OPTION chooses an option of a group.
  groups  {groups}
  keys    {keys}
  --help GROUP   its options and keys, with meaning and unit; --help KEY   one
  --cfg job      print the configuration that a command would use
  -m   sweep over values   --config-dir FOLDER   groups of your own   --version
"""  # noqa: D205, D415 - the text of `--help`, which has to fit on one screen

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf

from hpctrain.config.compose import Composer, ProgramComposer, SweepComposer, is_of_sweep
from hpctrain.config.overrides import open_overrides, quoted
from hpctrain.config.paths import top_level_keys
from hpctrain.config.root import GROUPS, PROGRAM_KEYS, SWEEP_GROUP
from hpctrain.config.sweep import KINDS
from hpctrain.errors import ConfigError

WIDTH = 80
"""Columns of the text."""
INDENT = " " * 4


def help_text(composer: Composer, words: Sequence[str], config_dir: str | None = None) -> str:
    """Return the help.

    Args:
        composer: of the command line's folders.
        config_dir: the folder of `--config-dir`; None for none.
        words: what follows `--help`: groups, keys, and the choices and values with which to show them.

    Raises:
        ConfigError: a word is neither a group nor a key; or a choice is invalid.
    """
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    # `--help cluster=slurm` shows the keys of that choice
    names = names or [word.partition("=")[0].lstrip("+") for word in overrides]
    if any(map(is_of_sweep, names)):
        composer, overrides = SweepComposer(config_dir), _sweep_with(names, overrides)
    elif any(word.partition(".")[0] in PROGRAM_KEYS for word in names):
        composer = ProgramComposer(["COMMAND"], config_dir)
    if not names:
        groups = textwrap.wrap(" ".join([*GROUPS, "experiment"]), WIDTH - 10)
        keys = textwrap.wrap(" ".join([*top_level_keys(), *sorted(PROGRAM_KEYS - set(GROUPS))]), WIDTH - 10)
        return (__doc__ or "python -OO keeps no help\n").format(
            groups="\n          ".join(groups), keys="\n          ".join(keys)
        )
    with composer.explaining(overrides):
        node = composer.compose_with_hydra(list(map(quoted, open_overrides(overrides))))
    return "\n".join("\n".join(_describe(composer, node, name)) for name in dict.fromkeys(names)) + "\n"


def _sweep_with(words: Sequence[str], overrides: list[str]) -> list[str]:
    """Add the option of `sweep` that has the named key: a grid, the default, has few."""
    names = [name.partition(".")[2] for name in words]
    owners = [kind for kind, schema in KINDS.items() if any(name in all_fields(schema) for name in names)]
    is_chosen = any(word.startswith(f"{SWEEP_GROUP}=") for word in overrides)
    return overrides if is_chosen or not owners else [f"{SWEEP_GROUP}={owners[0]}", *overrides]


def _describe(composer: Composer, node: DictConfig, name: str) -> Iterator[str]:
    if "." not in name and (options := composer.options.of(name)):
        yield from _describe_group(node, name, options)
        return
    group, _, key = name.rpartition(".")
    parent = OmegaConf.select(node, group) if group else node
    if not isinstance(parent, DictConfig) or key not in parent or name == "hydra":
        names = [*GROUPS, *top_level_keys(), *(f"{group}.{inner}" for group in GROUPS for inner in _keys(node, group))]
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "--help alone lists groups and keys"
        raise ConfigError("--help", name, "is not a group or a key", remedy)
    yield from _describe_key(parent, key, f"{group}." if group else "")


def _describe_group(node: DictConfig, name: str, options: Sequence[str]) -> Iterator[str]:
    schemas = GROUPS.get(name)
    if schemas is not None:
        yield f"{name}: {purpose_of(next(iter(schemas.values()))).partition(' Owner: ')[0]}"
    choice = node.hydra.runtime.choices.get(name)
    words = " ".join(f"[{option}]" if option == choice else option for option in options)
    if words != "[default]":
        yield from textwrap.wrap(f"options: {words}; --help {name}=OPTION shows another", WIDTH, subsequent_indent="  ")
    yield ""
    for key in _keys(node, name):
        yield from _describe_key(node._get_node(name), key, f"{name}.")


def _keys(node: DictConfig, group: str) -> list[str]:
    value = node.get(group)
    return list(map(str, value)) if isinstance(value, DictConfig) else []


def _describe_key(node: Any, key: str, prefix: str) -> Iterator[str]:
    """Describe one key: its name and value, then its meaning and type, as far as the schema knows it."""
    value, schema = node._get_node(key), OmegaConf.get_type(node)
    inner = OmegaConf.get_type(value) if isinstance(value, DictConfig) else None
    if inner is not None and dataclasses.is_dataclass(inner):
        for name in map(str, value):
            yield from _describe_key(value, name, f"{prefix}{key}.")
        return
    yield f"{prefix}{key}={_value_text(value)}"
    field = all_fields(schema).get(key) if schema is not None and dataclasses.is_dataclass(schema) else None
    if field is not None:
        yield from textwrap.wrap(f"{field.text} ({field.type})", WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def _value_text(node: Any) -> str:
    """A value as it is typed; interpolations stay as they are."""
    if isinstance(node, Container):
        return json.dumps(OmegaConf.to_container(node)).replace(" ", "")
    value = node._value()
    if value == "???":
        return "(required)"
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)


@dataclasses.dataclass(frozen=True, slots=True)
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
            yield FieldDoc(node.target.id, _type_text(node.annotation), _default_text(node.value, constants), text)


def all_fields(schema: type) -> dict[str, FieldDoc]:
    """Return the documented keys of a schema class by name, inherited ones included."""
    bases = [base for base in reversed(schema.__mro__) if dataclasses.is_dataclass(base)]
    return {field.name: field for base in bases for field in own_fields(base)}


def purpose_of(schema: type) -> str:
    """Return the purpose of a group: what its schema module's docstring says after the colon."""
    module = inspect.getmodule(schema)
    assert module is not None
    text = " ".join((module.__doc__ or "").split()).partition(": ")[2]
    return f"{text[:1].upper()}{text[1:]}".replace("``", "`")


def _type_text(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]
    return ast.unparse(annotation).replace("None", "null")


def _default_text(value: ast.expr, constants: Mapping[str, object]) -> str:
    text = str(constants[value.id]) if isinstance(value, ast.Name) else ast.unparse(value)
    if text.startswith("field(default_factory="):
        inner = text.removeprefix("field(default_factory=").removesuffix(")")
        text = {"dict": "{}", "list": "[]"}.get(inner, inner.removeprefix("lambda: "))
    return {"None": "null", "True": "true", "False": "false"}.get(text, text.strip("'"))
