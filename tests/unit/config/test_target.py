"""A class that a config names, and its arguments, are checked by the source alone."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.source import _bound_names
from hpctrain.config.target import check_targets
from hpctrain.errors import ConfigError

OWN = """
import functools
from abc import ABC, ABCMeta
from dataclasses import KW_ONLY, InitVar, dataclass, field
import dataclasses as dc
from typing import ClassVar, Generic, TypeVar
raise RuntimeError("imported")

T = TypeVar("T")

class Plain(ABC):
    def __init__(self, width, depth=2, *, rate: float = 0.1):
        pass

class Inherits(Plain):
    pass

class Overrides(Plain):
    def __init__(self, height):
        pass

class Nothing(Generic[T]):
    pass

class Rest(Plain):
    def __init__(self, width, **options):
        pass

@dataclass
class Record(Nothing[int]):
    count: ClassVar[int] = 0
    width: int
    seed: InitVar[int]
    _: KW_ONLY
    depth: int = 2
    names: list[str] = field(default_factory=list)
    cache: dict = field(init=False)

@dc.dataclass(frozen=True)
class More(Record):
    rate: float
    width: int = 3

@dataclass(init=False)
class ByHand(Record):
    other: int
    def __init__(self, given):
        pass

class Defaults(Plain):
    width = 4
    seed: int = 5
    depth: int

    def names(self):
        pass

@dataclass
class Filled(Defaults):
    depth: int
    width: int
    seed: int
    names: list[str]

@dataclass
class Fixed(Record):
    width: int = field(init=False, default=3)
    seed: ClassVar[int] = 5

@dataclass
class Refilled(Record):
    _: KW_ONLY
    names: list[str]
    depth: int

def make(width, depth=1):
    pass

# what the source doesn't show
class Meta(metaclass=ABCMeta):
    def __init__(self, width):
        pass

class Made(Plain):
    def __new__(cls, *given, **options):
        pass

class Registry:
    def __init_subclass__(cls):
        pass

class Registered(Registry):
    def __init__(self, width):
        pass

@functools.total_ordering
class Decorated:
    def __init__(self, width):
        pass

class Wrapped:
    @functools.wraps(make)
    def __init__(self, width):
        pass

class Several(Plain, Record):
    pass

class Assigned(Plain):
    __init__ = make

class FromElsewhere(functools.partial):
    pass

if T:
    class Twice:
        def __init__(self, width):
            pass
else:
    Twice = Plain

def bind():
    global Global
    Global = Plain

bind()
match Plain, [Plain], {}:
    case Matched, [*Starred], {**Rested}:
        pass

Alias = Plain
cached = functools.lru_cache(make)
"""
PLACES = {
    "__init__.py": "from .parts import Plain, Record as Row\nfrom .gone import Gone\nfrom . import lazy",
    "parts.py": OWN,
    "lazy.py": "def __getattr__(name):\n    return dict",
    "star.py": "from .parts import *",
    "patched.py": "class Patched:\n    pass\nPatched.__init__ = print",
    "set_later.py": "class SetLater:\n    pass\nsetattr(SetLater, '__init__', print)",
    "dynamic.py": "for name in 'ab':\n    globals()[name] = dict",
    "conditional.py": "try:\n    from fast import Thing\nexcept ImportError:\n    Thing = None",
    "broken.py": "class Broken:\n    def (",
    "loop.py": "from .pool import Round",
    "pool.py": "from .loop import Round",
    "inner/module.py": "from ..parts import Plain",
    "compiled.so": "",
    "bytes.py": "class Bytes:\n    text = '\\d'\n    \0",
}
FITTING = {
    "parts.Plain": "width",
    "parts.Inherits": "width depth rate",
    "parts.Overrides": "height",
    "parts.Nothing": "",
    "parts.Rest": "width other",
    "parts.Record": "width seed depth names",
    "parts.More": "seed rate",
    "parts.ByHand": "given",
    "parts.Filled": "depth",
    "parts.Fixed": "depth",
    "parts.Refilled": "width seed names",
    "parts.make": "width",
    "Plain": "width",
    "Row": "width seed",
    "inner.module.Plain": "width depth",
}
NOT_FITTING = {
    ("parts.Plan", ""): "parts.Plan: the module own_parts.parts has no Plan; did you mean own_parts.parts.Plain?",
    ("part.Plain", ""): "part.Plain: the module own_parts has no part; did you mean own_parts.parts.Plain?",
    ("inner.modul.Plain", ""): "the module own_parts.inner has no modul; did you mean own_parts.inner.module.Plain?",
    ("parts.Zzz", ""): "the module own_parts.parts has no Zzz; it has ABC, ABCMeta, Alias",
    ("parts.Plain", ""): "needs the argument width; add +task.width=VALUE",
    ("parts.Record", "depth"): "needs the arguments width and seed; add +task.width=VALUE +task.seed=VALUE",
    ("parts.Plain", "widht"): "task.widht=1: own_parts.parts.Plain has no argument widht; did you mean task.width?",
    ("parts.Inherits", "width zzz"): "has no argument zzz; it takes width, depth, rate",
    ("parts.Nothing", "zzz"): "remove it: the class takes no argument",
    ("parts.Rest", "other"): "needs the argument width",
    ("parts.Record", "width seed count"): "has no argument count",
    ("parts.Record", "width seed cache"): "has no argument cache",
    ("parts.ByHand", "given other"): "has no argument other",
    ("parts.make", "zzz width"): "has no argument zzz",
    ("Row", "width"): "needs the argument seed",
    ("inner.module.Plain", ""): "needs the argument width",
    ("broken.Broken", ""): "broken.py, line 2, is not valid Python",
}
UNKNOWN = [
    *("parts.Meta", "parts.Made", "parts.Registered", "parts.Decorated", "parts.Wrapped", "parts.Several"),
    *("parts.Assigned", "parts.FromElsewhere", "parts.Twice", "parts.Alias", "parts.cached", "parts.Plain.make"),
    *("patched.Patched", "set_later.SetLater", "parts.Global", "parts.Matched", "parts.Starred", "parts.Rested"),
    *(
        "Gone",
        "lazy.Any",
        "star.Plain",
        "dynamic.a",
        "conditional.Thing",
        "loop.Round",
        "compiled.Class",
        "bytes.Bytes",
    ),
]


@pytest.fixture(autouse=True)
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the folder where the command is typed; importing it fails the test."""
    for name, text in PLACES.items():
        path = tmp_path / "own_parts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    yield
    assert not [name for name in sys.modules if name.startswith("own_parts")]


def node(target: str, names: str) -> dict[str, object]:
    return {"_target_": f"own_parts.{target}", **dict.fromkeys(names.split(), 1)}


@pytest.mark.parametrize("target", FITTING)
def test_a_class_with_the_arguments_that_it_takes_passes(target: str) -> None:
    check_targets("task", node(target, FITTING[target]))


@pytest.mark.parametrize(("target", "names"), NOT_FITTING)
def test_a_class_or_an_argument_that_is_not_there_is_named_with_what_was_meant(target: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_targets("task", node(target, names))
    assert NOT_FITTING[target, names] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", UNKNOWN)
def test_what_the_source_does_not_show_is_accepted(target: str) -> None:
    check_targets("task", node(target, "anything"))


def test_a_node_inside_is_checked_too() -> None:
    inside = {"width": node("parts.Plain", "widht")}
    with pytest.raises(ConfigError, match=r"^task\.width\.widht=1: .* did you mean task\.width\.width\?"):
        check_targets("task", node("parts.Overrides", "height") | inside)


def test_a_misspelt_module_is_compared_with_those_in_this_folder() -> None:
    with pytest.raises(ConfigError, match=r"module own_prats was not found; did you mean own_parts\.parts\.Plain\?"):
        check_targets("task", {"_target_": "own_prats.parts.Plain"})


def test_the_optimizer_class_gets_the_parameters_and_not_what_hpctrain_acts_on() -> None:
    words = ["optimizer=custom", "optimizer._target_=torch.optim.NAdam"]
    Composer().compose([*words, "+optimizer.momentum_decay=0.1", "optimizer.no_decay_norm_bias=true"])
    with pytest.raises(ConfigError, match=r"^optimizer\.momentum=0\.1: torch.optim.NAdam has no argument momentum"):
        Composer().compose([*words, "+optimizer.momentum=0.1"])
    with pytest.raises(ConfigError, match=r"the module torch\.optim has no Adm; did you mean torch\.optim\.Adam\?"):
        Composer().compose(["optimizer=custom", "optimizer._target_=torch.optim.Adm"])


def test_an_argument_added_to_a_task_of_hpctrain_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"^task\.agument=True: .* did you mean task\.augment\?"):
        Composer().compose(["+task.agument=true"])


def test_a_check_costs_milliseconds() -> None:
    check_targets("task", node("parts.More", "seed rate"))  # now its folder is in the system's cache
    _bound_names.cache_clear()
    began = time.process_time()
    check_targets("task", node("parts.More", "seed rate"))
    assert time.process_time() - began < 0.05
