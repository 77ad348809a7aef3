"""Avoid importing torch's compiler in ranks that compile nothing.

Importing the compiler takes about as long as importing torch itself, and the first optimizer of a plain script imports
it. Without that import a run reaches its first step in 0.81 of the time that a hand-written loop takes
(tests/benchmarks/startup.py), which is why this module patches torch: there is no switch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_COMPILER = "torch._dynamo"
_OPTIMIZERS = sys.modules[torch.optim.Optimizer.__module__].__file__
_VARIANT = "__dynamo_disable"
"""Where torch keeps the variant of a function that its compiler skips."""


def spare_compiler() -> None:
    """Stop optimizers and DDP from importing the compiler; for the whole process, and idempotent.

    Some of their methods are wrapped (`torch._disable_dynamo`): the first call imports the compiler, to make a variant
    that it skips. Every optimizer's step imports it, to mark where graphs break. Until something else imports the
    compiler, these methods run without their wrappers. Code that compiles imports it; from then on they run as torch
    wrote them.
    """
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            _spare_step(kind)
    for kind in (torch.optim.Optimizer, DistributedDataParallel):
        for method in vars(kind).values():
            _spare(method)


@contextmanager
def compiler_spared() -> Iterator[None]:
    """Give DDP's constructor, which asks the compiler for its mode, a stand-in, unless the compiler is imported."""
    if _COMPILER in sys.modules or "_dynamo" in vars(torch):
        yield
        return
    # torch._dynamo.config.optimize_ddp is True by default
    utils = _StandIn(module=f"{_COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in: Any = _StandIn(module=_COMPILER, utils=utils)
    torch._dynamo = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is stand_in:
            del torch._dynamo


def compile_in_place(model: nn.Module, mode: str = "default") -> None:
    """Compile the model's forward; the model itself and the names of its weights don't change.

    Args:
        model: not wrapped yet.
        mode: of torch.compile.
    """
    forward: Callable[..., Any] = model.forward

    # Not `model.compile()`: that begins in one of torch's frames, which the compiler skips, so it would silently
    # compile nothing in a torch.nn.Sequential. The first frame has to be ours.
    def begin(*arguments: Any, **keywords: Any) -> Any:
        return forward(*arguments, **keywords)

    model.forward = torch.compile(begin, mode=None if mode == "default" else mode)


def compile_parts_in_place(model: nn.Module, mode: str = "default") -> None:
    """Compile the outermost modules inside the model that have a forward, which a task with several losses calls.

    Args:
        model: not wrapped yet. If it has no such modules, it is compiled itself.
        mode: of torch.compile.
    """
    for part in _parts(model) or [model]:
        compile_in_place(part, mode)


def _parts(model: nn.Module) -> list[nn.Module]:
    parts: list[nn.Module] = []
    for child in model.children():
        # a module with the forward of torch only holds others, as a ModuleList does
        parts += _parts(child) if type(child).forward is nn.Module.forward else [child]
    # modules compare by identity; one may be an attribute of the model, and in a list of it, too
    return list(dict.fromkeys(parts))


def is_any_compiled(model: nn.Module) -> bool:
    """Whether torch.compile compiles the model, or a module inside the model."""
    return any(
        part._compiled_call_impl is not None
        or hasattr(part, "_orig_mod")
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        for part in model.modules()
    )


def uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled models run as they were written, and nothing is compiled."""
    # whatever is compiled has imported the compiler; importing it takes longer than many a context
    return torch.compiler.set_stance("force_eager") if _COMPILER in sys.modules else nullcontext()


def _spare(method: object) -> None:
    while (inner := getattr(method, "__wrapped__", None)) is not None:
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == torch._compile.__file__ and not hasattr(inner, _VARIANT):
            assert callable(method)
            setattr(inner, _VARIANT, _until_compiling(inner, method))
        method = inner


def _spare_step(kind: type[torch.optim.Optimizer]) -> None:
    step: Any = vars(kind).get("step")
    code = getattr(step, "__code__", None)
    if code is None or (code.co_filename, code.co_name) != (_OPTIMIZERS, "_use_grad"):
        return

    @functools.wraps(step)
    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return step(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step.__wrapped__(optimizer, *args, **kwargs)

    setattr(kind, "step", call)  # noqa: B010 - an assignment would have to repeat the overloads for mypy


def _until_compiling(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*args, **kwargs)
        if getattr(function, _VARIANT, None) is call:
            delattr(function, _VARIANT)
        return wrapper(*args, **kwargs)

    return call


class _StandIn(SimpleNamespace):
    """A module of which some attributes are known; any other attribute imports it."""

    def __getattr__(self, name: str) -> object:
        # torch's own attribute must be gone, or the import would not set it to the real module
        vars(torch).pop("_dynamo", None)
        return getattr(importlib.import_module(self.module), name)
