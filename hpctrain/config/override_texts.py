"""Overrides of values that a program gets, parsed together with their texts: Hydra reads `1.10` as the number 1.1."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from antlr4 import CommonTokenStream, InputStream  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from hpctrain.config.program import default_text

TEXTS = re.compile(r"cluster\.(env|sbatch|container\.env)(\.|$)")
"""Keys whose values become texts: variables, and options of sbatch."""


@dataclasses.dataclass(frozen=True)
class ValueWithText(QuotedString):
    """A number, a truth value or null, with its text.

    Hydra takes it for a quoted string: an override's value has `text`, which is the value here, and the values of a
    sweep are written by `with_quotes`.

    Attributes:
        source: the text.
    """

    text: Any
    source: str

    def with_quotes(self) -> str:
        """Return the text as it was typed."""
        return self.source


class TextKeepingParser(OverridesParser):
    """Hydra's parser, which keeps the texts of `args`, and reads no numbers where the value becomes a text."""

    def parse_rule(self, s: str, rule_name: str) -> Any:
        """As Hydra's, whose errors come first."""
        override = super().parse_rule(s, rule_name)
        if isinstance(override, Override) and (is_argument(override) or TEXTS.match(override.key_or_group)):
            parser = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(s))))
            override._value = _Visitor(self.functions).visitOverride(parser.override())._value  # type: ignore[no-untyped-call]
            if not is_argument(override):
                is_flag = override.key_or_group.startswith("cluster.sbatch")
                override._value = _map(override._value, partial(_as_option, keeps_flags=is_flag))
        return override


class _Visitor(HydraOverrideVisitor):
    def visitPrimitive(self, ctx: OverrideParser.PrimitiveContext) -> Any:  # noqa: N802 - ANTLR's name
        value, source = super().visitPrimitive(ctx), ctx.getText().strip()
        if isinstance(value, str | QuotedString):
            return value
        # such as the name of a commit, 12e4567
        is_beyond = (
            isinstance(value, float) and (math.isinf(value) or value == 0.0) and re.match(r"[^eE]*[1-9]", source)
        )
        return source if is_beyond else ValueWithText(value, Quote.single, source)

    def visitFunction(self, ctx: OverrideParser.FunctionContext) -> Any:  # noqa: N802 - ANTLR's name
        if ctx.getChild(0).getText() == "str":
            return _TextVisitor(self.functions).visitFunction(ctx)
        value = super().visitFunction(ctx)
        if isinstance(value, ChoiceSweep):
            # Hydra unquotes the arguments of a function
            typed = [element for element in map(self.visitElement, ctx.element()) if isinstance(element, ValueWithText)]
            value.list = [_with_source(plain, typed) for plain in value.list]
        return value


def _with_source(plain: Any, typed: Sequence[ValueWithText]) -> Any:
    return next((value for value in typed if type(value.text) is type(plain) and value.text == plain), plain)


class _TextVisitor(HydraOverrideVisitor):
    def visitPrimitive(self, ctx: OverrideParser.PrimitiveContext) -> Any:  # noqa: N802 - ANTLR's name
        value = super().visitPrimitive(ctx)
        return value if isinstance(value, str | QuotedString) else ctx.getText().strip()


def is_argument(override: Override) -> bool:
    """Whether an override is of `args`."""
    return override.key_or_group.partition(".")[0] == "args"


def has_differing_text(override: Override) -> bool:
    """Whether the text of an override's value isn't what a program gets for the value."""
    texts: list[bool] = []
    _map(override._value, lambda value: texts.append(value.source != default_text(value.text)))
    return any(texts)


def as_texts(override: Override) -> Override:
    """Return an override of `args` with the texts of its numbers, truth values and nulls in their places."""
    # ~KEY=VALUE compares with the value
    value = None if override.is_delete() else _map(override._value, lambda typed: typed.source)
    return dataclasses.replace(override, _value=value)


def _as_option(value: ValueWithText, *, keeps_flags: bool) -> object:
    """The text of a number or a truth value, except for sbatch, for which true is a flag."""
    is_other = value.text is not None and str(value.text) != value.source
    return value.source if is_other and not (keeps_flags and isinstance(value.text, bool)) else value.text


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, ValueWithText):
        return change(value)
    if isinstance(value, list):
        return [_map(inside, change) for inside in value]
    if isinstance(value, dict):
        return {key: _map(inside, change) for key, inside in value.items()}
    if isinstance(value, ChoiceSweep):
        return dataclasses.replace(value, list=_map(value.list, change))
    return value
