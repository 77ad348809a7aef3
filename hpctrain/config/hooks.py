"""The hooks of callbacks: their names and arguments, and the errors for a class that doesn't fit them."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection

from hpctrain.config.signature import unfit
from hpctrain.errors import ConfigError

BASE = "hpctrain.callbacks.callback.Callback"
"""The class that callbacks derive from."""
HOOKS = (
    "on_start",
    "before_step",
    "after_backward",
    "after_step",
    "after_evaluation",
    "after_save",
    "on_stop",
    "on_end",
)
"""The methods that the training calls."""
STATE_METHODS = ("state_dict", "load_state_dict")
"""The methods that save and restore a callback's state."""
ARGUMENTS = {"after_evaluation": ("training", "metrics")}
"""What hooks are called with, where it isn't the training alone."""
CLOSE = 0.9
"""Similarity (`difflib`) from which a name is taken for a typo of a hook: `aftr_step`, but not `load_state`."""


def cant_be_called(key: str, target: str, hook: str, why: str) -> ConfigError:
    """Return the error for a hook with other arguments."""
    arguments = ", ".join(("self", *ARGUMENTS.get(hook, ("training",))))
    problem = f"its {hook} can't be called: {why}"
    return ConfigError(f"{key}._target_", target, problem, f"write def {hook}({arguments})")


def wrong_arguments(key: str, target: str, method: ast.FunctionDef) -> ConfigError | None:
    """Return the error for a hook that doesn't take its arguments, as its source shows them; None for any other."""
    if method.name not in HOOKS:
        return None
    why = unfit(method, 1 + len(ARGUMENTS.get(method.name, ("training",))))
    return None if why is None else cant_be_called(key, target, method.name, why)


def not_a_callback(key: str, target: str) -> ConfigError:
    """Return the error for a class that isn't a callback."""
    problem = "is not a subclass of hpctrain.callbacks.Callback"
    return ConfigError(f"{key}._target_", target, problem, "derive the class from it")


def not_a_hook(key: str, target: str, method: str) -> ConfigError | None:
    """Return the error for a method that looks like a hook and isn't one; None for any other.

    Args:
        key: full name of the callback's entry.
        target: its class.
        method: name of a method.
    """
    known = (*HOOKS, *STATE_METHODS)
    if method in known or method.startswith("_"):
        return None
    looks_like_a_hook = re.match("(on|before|after)_", method)
    near = difflib.get_close_matches(method, known, n=1, cutoff=0.0 if looks_like_a_hook else CLOSE)
    if not near:
        return None
    problem = f"has {method}, which is not a hook and would never be called"
    remedy = f"did you mean {near[0]}? The hooks are {', '.join(HOOKS)}; begin the name of any other method with _"
    return ConfigError(f"{key}._target_", target, problem, remedy)


def runs_nothing(key: str, target: str, hook: str, kind: str) -> ConfigError:
    """Return the error for a hook whose call would only make an object, and run nothing.

    Args:
        key: full name of the callback's entry.
        target: its class.
        hook: the name of its method.
        kind: what it is instead of a plain function: `a coroutine` or `a generator`.
    """
    problem = f"its {hook} is {kind}, so calling it would run nothing"
    return ConfigError(f"{key}._target_", target, problem, f"write a plain def {hook}, without async or yield")


def half_a_state(key: str, target: str, defined: Collection[str]) -> ConfigError | None:
    """Return the error for a class that has one of the two methods of the state and lacks the other; None if not.

    Args:
        key: full name of the callback's entry.
        target: its class.
        defined: names of the methods that it overrides.
    """
    own = [name for name in STATE_METHODS if name in defined]
    if len(own) != 1:
        return None
    (missing,) = set(STATE_METHODS) - set(own)
    problem = f"has {own[0]} and not {missing}, so a resume would lose the state"
    return ConfigError(f"{key}._target_", target, problem, f"define {missing}, too")
