"""Parse overrides and keep the texts of a program's values as they were typed: Hydra reads `1.10` as the number 1.1."""

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


class TextKeepingParser(OverridesParser):
    """Hydra's parser, except that it keeps the texts of `args`, and those of keys whose values are used as texts."""

    def parse_rule(self, s: str, rule_name: str) -> Any:
        """Parse with Hydra first, for its errors, and then again for the texts."""
        override = super().parse_rule(s, rule_name)
        if isinstance(override, Override) and (is_argument(override) or TEXT_KEYS.match(override.key_or_group)):
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
        # out of range: the hash of a commit, such as 12e4567, rather than a number
        is_out_of_range = (
            isinstance(value, float) and (math.isinf(value) or value == 0.0) and re.match(r"[^eE]*[1-9]", source)
        )
        return source if is_out_of_range else ValueWithText(value, Quote.single, source)

    def visitFunction(self, ctx: OverrideParser.FunctionContext) -> Any:  # noqa: N802 - ANTLR's name
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
    def visitPrimitive(self, ctx: OverrideParser.PrimitiveContext) -> Any:  # noqa: N802 - ANTLR's name
        value = super().visitPrimitive(ctx)
        return value if isinstance(value, str | QuotedString) else ctx.getText().strip()


def is_argument(override: Override) -> bool:
    """Whether an override sets a value of `args`."""
    return override.key_or_group.partition(".")[0] == "args"


def has_differing_text(override: Override) -> bool:
    """Whether the text that was typed differs from the default text of the value."""
    texts: list[bool] = []
    _map(override._value, lambda value: texts.append(value.source != default_text(value.text)))
    return any(texts)


def as_texts(override: Override) -> Override:
    """Return an override of `args` whose numbers, truth values and nulls are replaced by their texts."""
    # ~KEY=VALUE compares with the value
    texts = None if override.is_delete() else _map(override._value, lambda value: value.source)
    return dataclasses.replace(override, _value=texts)


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
