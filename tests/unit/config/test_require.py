from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from hpctrain.config import require
from hpctrain.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Keys(require.Checked):
    steps: Annotated[int | None, require.at_least(1, " step")] = None
    rate: Annotated[float, require.above(0)] = 0.1
    share: Annotated[float, require.between(0, 1)] = 0.5
    size: Annotated[int, require.one_of(18, 34)] = 18
    name: Annotated[str, require.single_line] = ""
    decays: Annotated[list[float], require.each(require.between(0, 1))] = field(default_factory=list)
    pair: Annotated[list[int] | None, require.that(lambda pair: len(pair) == 2, "is odd", "write {key}=[1,2]")] = None


@dataclass(kw_only=True, slots=True)
class MoreKeys(Keys):
    prefix = "more."
    free: int = 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", 0, "steps=0: must be at least 1 step; set more.steps=1 or more"),
        ("rate", 0.0, "rate=0.0: must be a number above 0; set more.rate to one"),
        ("rate", math.inf, "rate=inf: must be a number above 0; set more.rate to one"),
        ("rate", math.nan, "rate=nan: must be a number above 0; set more.rate to one"),
        ("share", 1.5, "share=1.5: must be in [0, 1]; set more.share to a number in this range"),
        ("share", math.nan, "share=nan: must be in [0, 1]; set more.share to a number in this range"),
        ("size", 50, "size=50: is not known; choose one of 18, 34"),
        ("name", "a\x7f", r"name='a\x7f': contains a line break or a control character; write it on one line"),
        ("decays", [0, -1], "decays=-1: must be in [0, 1]; set more.decays to a number in this range"),
        ("pair", [1], "pair=[1]: is odd; write more.pair=[1,2]"),
    ],
)
def test_a_value_is_refused_as_its_annotation_requires(key, value, message):
    with pytest.raises(ConfigError) as caught:
        MoreKeys(**{key: value})
    assert str(caught.value) == f"more.{message}"


def test_good_values_and_none_pass():
    MoreKeys()
    MoreKeys(steps=1, rate=1e-9, share=1, size=34, name="a b", decays=[0, 1], pair=[1, 2], free=-1)


def test_a_key_is_named_after_its_module():
    assert Keys().prefix == "test_require."
