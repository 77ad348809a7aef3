"""Overrides in Hydra's grammar: `KEY=VALUE`, and `GROUP=OPTION`, which chooses from the options of all folders."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, ValueType
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from hpctrain.config import require
from hpctrain.config.gpu_request import GRES
from hpctrain.config.logger import SERVICES
from hpctrain.config.program import default_text
from hpctrain.config.root import GROUPS, LIST_GROUPS, SWEEP_GROUP
from hpctrain.errors import ConfigError
from hpctrain.scheduler.gres import ASKS_FOR_GPUS

MISTAKES = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError)
"""What composing raises for mistakes on the command line and in configuration files."""
GRAMMAR: Any = overrides_parser
"""The module with the grammar's classes and those of ANTLR, which is another package in Hydra 1.4."""

_SERVICE_MAPPINGS = "|".join(
    rf"logger\.{name}\.{field.name}"
    for name, group in SERVICES.items()
    for field in dataclasses.fields(group)
    if field.default_factory is dict
)
OPEN_NODES = re.compile(rf"^(args|cluster\.(env|sbatch|container\.env)|optimizer\.named|{_SERVICE_MAPPINGS})([.=])")
"""Keys whose names the user chooses; here new names need no plus sign, which Hydra requires elsewhere."""


def open_overrides(overrides: Sequence[str]) -> list[str]:
    """Add the plus signs to overrides of `OPEN_NODES`, and the brackets to names of runs."""
    return [f"++{override}" if OPEN_NODES.match(override) else in_brackets(override) for override in overrides]


def apply_overrides(node: DictConfig, overrides: Sequence[str], *, as_typed: bool = False) -> None:
    """Apply overrides of values, as they are typed, to a stored configuration.

    Args:
        node: of the configuration.
        overrides: as typed.
        as_typed: store the texts of `args` instead of their values.

    Raises:
        ConfigError: one can't be parsed, has several values, or names an unknown key.
    """
    parser = TextKeepingParser.create()
    for override_text, override in zip(overrides, open_overrides(overrides), strict=True):
        try:
            for parsed in parser.parse_overrides([override]):
                single = require_single_value(parsed, can_sweep=False)
                apply_override(as_texts(single) if as_typed else single, node)
        except MISTAKES as error:
            from hpctrain.config.explain import Explainer  # for mistakes alone

            text = "\n".join(filter(None, (str(error), str(error.__cause__ or ""))))
            raise Explainer(text, [override_text], lambda: sorted(keys_of(node))).explain() from error


def apply_override(override: Override, node: DictConfig) -> None:
    """Apply one override of a value.

    Raises:
        ConfigError: OmegaConf fails on the value. Other mistakes raise `MISTAKES`.
    """
    try:
        _apply(override, node)
    except MISTAKES:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # OmegaConf fails in its own code on some values, such as a list for a group
        problem = f"can't be used here: {error}"
        raise ConfigError(override.key_or_group, value_as_typed(override), problem, require.HELP) from error


def _apply(override: Override, node: DictConfig) -> None:
    key, value = override.key_or_group, override.value()
    if override.package is not None:
        problem = "is placed elsewhere with @, as only groups are, and there is no such group"
        raise ConfigError(key, value_as_typed(override), problem, f"leave out @{override.package}")
    if override.type.name == "EXTEND_LIST":  # since Hydra 1.4, which already deprecates it
        raise ConfigError(key, value_as_typed(override), "can't extend a list", f"write the whole list: {key}=[...]")
    try:
        if override.is_delete():
            _delete(override, node)
            return
        is_single = not isinstance(value, dict | list)
        if override.is_add() and is_single and OmegaConf.select(node, key, throw_on_missing=False) is not None:
            word = value_as_typed(override)
            raise ConfigError(f"+{key}", word, "already has a value", f"write it without the plus sign: {key}={word}")
        OmegaConf.update(node, key, value, merge=True, force_add=override.is_add() or override.is_force_add())
    except OmegaConfBaseException as error:
        is_unknown = isinstance(error, ConfigAttributeError | ConfigKeyError) and override.type.name == "CHANGE"
        text = f"Could not override '{key}'." if is_unknown else f"Error merging override {override.input_line}"
        raise ConfigCompositionException(text) from error  # which `Explainer` explains, as those of Hydra itself


def _delete(override: Override, node: DictConfig) -> None:
    key, expected = override.key_or_group, override.value()
    value = OmegaConf.select(node, key, throw_on_missing=False)
    if value is None:
        raise ConfigCompositionException(f"Could not delete from config. '{key}' does not exist.")
    if expected is not None and expected != value:
        raise ConfigError(
            f"~{key}", value_as_typed(override), f"is {value} here", f"write ~{key} to remove it whatever its value"
        )
    group, _, name = key.rpartition(".")
    with open_dict(node):
        del (OmegaConf.select(node, group) if group else node)[name]


def keys_of(node: Any, prefix: str = "") -> list[str]:
    """Return the full names of all keys, groups included."""
    keys = [prefix] if prefix else []
    if isinstance(node, DictConfig) and not node._is_none():
        for key in node:
            name = str(key)
            keys += keys_of(node._get_node(name), f"{prefix}.{name}" if prefix else name)
    return keys


TEXT_KEYS = re.compile(r"cluster\.(env|sbatch|container\.env)(\.|$)")
"""Keys whose values are used as texts: variables, and options of sbatch."""


@dataclasses.dataclass(frozen=True)
class ValueWithText(QuotedString):
    """A number, a truth value or null, together with the text that was typed for it.

    It is a `QuotedString` to Hydra, which takes the value from `text`, and writes the values of a sweep by
    `with_quotes`.

    Attributes:
        text: the value.
        source: the text as typed.
    """

    text: Any
    source: str

    def with_quotes(self) -> str:
        """Return the text as it was typed."""
        return self.source


class TextKeepingParser(overrides_parser.OverridesParser):
    """Hydra's parser, except that it keeps the texts of `args`, and those of keys whose values are used as texts."""

    def parse_rule(self, s: str, rule_name: str) -> Any:
        """Parse with Hydra first, for its errors, and then again for the texts."""
        override = super().parse_rule(s, rule_name)
        if isinstance(override, Override) and (is_argument(override) or TEXT_KEYS.match(override.key_or_group)):
            parser = GRAMMAR.OverrideParser(GRAMMAR.CommonTokenStream(GRAMMAR.OverrideLexer(GRAMMAR.InputStream(s))))
            override._value = _Visitor(self.functions).visitOverride(parser.override())._value
            if not is_argument(override):
                is_flag = override.key_or_group.startswith("cluster.sbatch")
                override._value = _map_texts(override._value, partial(_as_option, keeps_flags=is_flag))
        return override


class _Visitor(HydraOverrideVisitor):
    def visitPrimitive(self, ctx: Any) -> Any:  # noqa: N802 - ANTLR's name
        value, source = super().visitPrimitive(ctx), ctx.getText().strip()
        if isinstance(value, str | QuotedString):
            return value
        # out of range: the hash of a commit, such as 12e4567, rather than a number
        is_out_of_range = (
            isinstance(value, float) and (math.isinf(value) or value == 0.0) and re.match(r"[^eE]*[1-9]", source)
        )
        return source if is_out_of_range else ValueWithText(value, Quote.single, source)

    def visitFunction(self, ctx: Any) -> Any:  # noqa: N802 - ANTLR's name
        if ctx.getChild(0).getText() == "str":
            return _TextVisitor(self.functions).visitFunction(ctx)
        value = super().visitFunction(ctx)
        if isinstance(value, ChoiceSweep):
            # Hydra unquotes the arguments of a function
            elements = map(self.visitElement, ctx.element())
            with_texts = [element for element in elements if isinstance(element, ValueWithText)]
            value.list = [_with_source(plain, with_texts) for plain in value.list]
        return value


def _with_source(plain: Any, with_texts: Sequence[ValueWithText]) -> Any:
    return next((value for value in with_texts if type(value.text) is type(plain) and value.text == plain), plain)


class _TextVisitor(HydraOverrideVisitor):
    def visitPrimitive(self, ctx: Any) -> Any:  # noqa: N802 - ANTLR's name
        value = super().visitPrimitive(ctx)
        return value if isinstance(value, str | QuotedString) else ctx.getText().strip()


def is_argument(override: Override) -> bool:
    """Whether an override sets a value of `args`."""
    return override.key_or_group.partition(".")[0] == "args"


def has_differing_text(override: Override) -> bool:
    """Whether the text that was typed differs from the default text of the value."""
    texts: list[bool] = []
    _map_texts(override._value, lambda value: texts.append(value.source != default_text(value.text)))
    return any(texts)


def as_texts(override: Override) -> Override:
    """Return an override of `args` whose numbers, truth values and nulls are replaced by their texts."""
    # ~KEY=VALUE compares with the value
    texts = None if override.is_delete() else _map_texts(override._value, lambda value: value.source)
    return dataclasses.replace(override, _value=texts)


def _as_option(value: ValueWithText, *, keeps_flags: bool) -> object:
    """The text of a number or a truth value, except for sbatch, for which true is a flag."""
    is_other = value.text is not None and str(value.text) != value.source
    return value.source if is_other and not (keeps_flags and isinstance(value.text, bool)) else value.text


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, ValueWithText):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(inside, change) for inside in value]
    if isinstance(value, dict):
        return {key: _map_texts(inside, change) for key, inside in value.items()}
    if isinstance(value, ChoiceSweep):
        return dataclasses.replace(value, list=_map_texts(value.list, change))
    return value


TAKES_COMMAS = re.compile(r"after|cluster\.(partition|exclude|constraint|reservation|qos|network_interface|sbatch\..+)")
"""Keys whose values may be comma-separated lists: runs, SLURM's options, and the interfaces of gloo and NCCL."""
NOT_SWEPT = {
    "cluster": "type one command for each",
    "cluster.kind": "type one command for each",
    "cluster.wait": "type one command for each",
    "cluster.dry_run": "type one command for each",
    "run_dir": "runs are RUN_DIR/0, RUN_DIR/1, ...",
}
"""Keys that decide how a sweep itself is launched, and what to do instead of sweeping over them."""


def takes_as_list(override: Override) -> bool:
    """Return whether several values are one for this key: a list, unquoted, that SLURM takes as it is typed."""
    is_list = override.value_type is ValueType.SIMPLE_CHOICE_SWEEP and not re.search("['\"]", value_as_typed(override))
    return is_list and TAKES_COMMAS.fullmatch(override.key_or_group) is not None


def refuse_ambiguous_gres(override: Override) -> None:
    """Refuse a sweep over cluster.sbatch.gres, some of whose runs would train without the GPUs of the others.

    Raises:
        ConfigError: it may be one list of resources, such as `gpu:a100:4,nvme:1`.
    """
    key, value = override.key_or_group, value_as_typed(override)
    if key == GRES and takes_as_list(override):
        have_gpus = {ASKS_FOR_GPUS.match(text.strip()) is not None for text in value.split(",")}
        if len(have_gpus) > 1:
            remedy = f"write \"{key}='{value}'\" for one, or {key}=choice({value}) to sweep over them"
            raise ConfigError(key, value, "is several values with -m, of which some have no GPUs", remedy)


def require_single_value(override: Override, *, can_sweep: bool = True) -> Override:
    """Return the override with one value, for a command that doesn't sweep.

    Args:
        override: parsed.
        can_sweep: whether the command can sweep, with -m.

    Raises:
        ConfigError: it has several, such as `a,b` or `range(1,3)`.
    """
    if not override.is_sweep_override():
        return override
    key, value_text = override.key_or_group, value_as_typed(override)
    is_list = override.value_type is ValueType.SIMPLE_CHOICE_SWEEP and not re.search("['\"]", value_text)
    if takes_as_list(override):
        # as typed: Hydra reads the items as numbers where it can, and would drop the zeros of 007
        return dataclasses.replace(override, value_type=ValueType.ELEMENT, _value=value_text)
    remedies = ["add -m to sweep over them"] if can_sweep and key not in NOT_SWEPT else []
    if key in LIST_GROUPS:
        remedies += [f"write {key}=[{value_text}] to choose them all"]
    elif key in GROUPS:
        remedies += ["choose one option"]
    elif is_list and not key.startswith(f"{SWEEP_GROUP}."):  # none of a sweep's keys takes a text or a list
        remedies += [f"write {key}='\"{value_text}\"' for a string, {key}=[{value_text}] for a list"]
    raise ConfigError(key, value_text, "has several values", ", or ".join(remedies or ["write one value"]))


def in_brackets(override: str) -> str:
    """Write the names of runs as the list that the key has, with quotes: Hydra would read some names as numbers.

    So they are a list in a sweep too, where Hydra takes `KEY=A,B` for two values.
    """
    key, is_given, value = override.partition("=")
    if key.lstrip("+") != "after" or not is_given or re.search(r"[\[({$]", value):
        return override
    if re.search(r"['\"\\]", value):
        return f"{key}=[{value}]"
    names = [] if value.strip() in ("", "null") else value.split(",")
    return f"{key}=[{','.join(repr(name.strip()) for name in names)}]"


def quoted(override: str) -> str:
    """Quote a list that `require_single_value` accepts unquoted; Hydra's own commands would refuse it."""
    key, _, value = override.partition("=")
    is_list = "," in value and not re.search(r"['\"\\()\[\]{}]", value)
    return f"{key}='{value}'" if is_list and TAKES_COMMAS.fullmatch(key.lstrip("+")) else override


def with_first_value(override: Override) -> Override:
    """Return the override with the first of its values, to stand for all runs of a sweep."""
    if not override.is_discrete_sweep():
        return override
    first = next(iter(override.sweep_string_iterator()), "")
    line = f"{override.get_key_element()}={first}"
    return dataclasses.replace(override, value_type=ValueType.ELEMENT, _value=first, input_line=line)


def value_as_typed(override: Override) -> str:
    """Return what follows the equals sign."""
    return str(override.input_line).partition("=")[2].strip()


class GroupOptions:
    """The options of all groups.

    Args:
        loader: Hydra's, with the folders to search.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self._loader = loader
        self._is_group: dict[str, bool] = {}

    def of(self, group: str) -> list[str]:
        """Return the options of one group."""
        return [name for name in self._loader.get_group_options(group) if not name.startswith("base_")]

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses options of a group, rather than set a key.

        Raises:
            ConfigError: it does, but its value can't be an option.
        """
        key = override.key_or_group
        if key.startswith("hydra"):
            return True
        # a group's name has no dot; asking Hydra takes 40 ms each time, since it copies its whole store to answer
        if "." in key:
            return False
        if key not in self._is_group:
            self._is_group[key] = bool(self._loader.get_group_options(key))
        if not self._is_group[key]:
            return False
        value = override.value()
        names = value if key in LIST_GROUPS and isinstance(value, list) else [value]
        if not (override.is_delete() or all(map(_may_be_file, names))):
            raise ConfigError(key, value, f"is not an option of the group {key}", self._remedy(key, value))
        return True

    def require_own_entries(self, choice: Override) -> None:
        """Refuse several options of a list whose files have an entry by the same name: the last would replace the rest.

        Entries that a file has from its own defaults list don't count: it is meant to change them.
        """
        group, options = choice.key_or_group, choice.value()
        if group not in LIST_GROUPS or not isinstance(options, list):
            return
        sources, owners = self._loader.get_sources(), dict[object, str]()
        for option in map(str, options):
            path = f"{group}/{option}"
            # Hydra, too, takes the first source that has it
            file = next((source.load_config(path) for source in sources if source.is_config(path)), None)
            for name in _entries(group, option, file):
                if name in owners:
                    problem = f"{owners[name]} and {option} both have the entry {name}, and only one would count"
                    raise ConfigError(group, f"[{','.join(options)}]", problem, "rename the entry in one of them")
                owners[name] = option

    def _remedy(self, group: str, value: object) -> str:
        from hpctrain.config.explain import option_instead  # for mistakes alone

        if isinstance(value, dict) and value and group not in LIST_GROUPS:
            keys = [f"{group}.{name}" for name in value]
            return f"set its keys one by one: {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
        if (instead := option_instead(group, value)) is not None:
            return instead
        names = ", ".join(self.of(group))
        if group in LIST_GROUPS:
            return f"write {group}=[] for none, or choose from {names}: {group}=[NAME,NAME]"
        return f"choose one of {names}"


def _entries(group: str, option: str, file: ConfigResult | None) -> set[str]:
    """Return the entries of a group that a file has, wherever its header `# @package` places it."""
    if file is None or not isinstance(file.config, DictConfig):
        return set()
    package = (file.header.get("package") or "_group_").replace("_group_", group).replace("_name_", option)
    names = {str(name) for name in file.config} - {"defaults"}
    if package == "_global_":
        return {str(name) for name in file.config.get(group) or ()}
    if package == group:
        return names
    first, _, below = package.removeprefix("_global_.").partition(".")
    return {below.partition(".")[0]} if first == group and below and names else set()


def _may_be_file(option: object) -> bool:
    """Whether an option may be a file's name; Hydra's own errors about others don't name the group."""
    return isinstance(option, str) and len(option) < 250 and option != "???" and not re.search(r"\0|\$\{", option)
