"""`hpctrain.compose`: a configuration, from the words of the command line or from values of Python."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING

from hydra import version
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime

from hpctrain.config.compose import Composer
from hpctrain.config.root import Config
from hpctrain.config.target import path_of, require_maker, target_bound
from hpctrain.errors import ConfigError
from hpctrain.phrases import page

if TYPE_CHECKING:
    from hpctrain.tasks.task import Task

PLAIN_KEY = re.compile(r"(?!(?:null|true|false|nan|inf)$)[a-z_][\w./*$@-]*", re.ASCII | re.IGNORECASE)
"""Keys of a mapping that Hydra's grammar takes as they are; it has no quotes for others."""
HYDRA_ENTRIES = ("hydra", "_dummy_empty_config_.yaml")
"""What Hydra itself keeps in its store."""

_composing = threading.RLock()


def compose(
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    task: Callable[..., Task] | None = None,
    config_dir: str | PurePath | None = None,
) -> Config:
    """Compose a configuration and check it, as `python -m hpctrain` does; nothing is written or launched.

    Options are found in `config_dir`, in hpctrain's own folder, and in ``conf`` in the working directory. May be called
    from any thread, and in a program that is itself a Hydra application.

    Args:
        overrides: as typed on the command line, such as ``["cluster=slurm", "nodes=4"]``; or values by key, such as
            ``{"cluster": "slurm", "optimizer.lr": 1e-3}``, where strings need no extra quotes.
        task: a class, or a function, that makes the task, in place of the words ``task=custom task._target_=...``. It
            gets the values below ``task`` as arguments. One of this program or notebook is for `fit`: jobs, and other
            processes, can't import it.
        config_dir: a folder with your own groups and options.

    Raises:
        ConfigError: an override, a value or a combination of values is invalid; the message says what to write.
    """
    words, folder = as_words(overrides), None if config_dir is None else str(config_dir)
    if task is None:
        with hydra_restored():
            return Composer(folder).compose(words)
    require_maker(task)
    for word in words:
        if word.startswith("task="):
            problem = "is a second task, next to the argument task="
            raise ConfigError("task", word.partition("=")[2], problem, "leave one of them out")
    target = path_of(task)
    with hydra_restored(), target_bound(target, task):
        return Composer(folder).compose(["task=custom", f"task._target_={target}", *words])


@contextmanager
def hydra_restored() -> Iterator[None]:
    """Context manager in which this thread may use Hydra; afterwards Hydra's global state is the program's again.

    In the context, the program's own entries in Hydra's store are hidden: they may have the names of hpctrain's.
    """
    with _composing:
        Plugins.instance()  # plugins add to the store when they are first imported; those entries must stay
        instance, store = GlobalHydra.instance(), ConfigStore.instance()
        hydra, base, repo = instance.hydra, version.getbase(), store.repo
        job = dict(JobRuntime.instance().conf)
        store.repo = {name: repo[name] for name in HYDRA_ENTRIES if name in repo}
        try:
            yield
        finally:
            instance.hydra = hydra
            version.VersionBase.instance().version_base = base
            store.repo = repo
            JobRuntime.instance().conf.update(job)


def as_words(overrides: Sequence[str] | Mapping[str, object]) -> list[str]:
    """Return overrides as typed on the command line.

    Raises:
        ConfigError: they are a single string or a class, or one is a flag; or a value is neither a string, a number, a
            boolean, None, nor a list or mapping of these; or a mapping has a key that isn't a plain word.
    """
    if isinstance(overrides, str):
        raise ConfigError("overrides", overrides, "is a string, expected a list of strings", f"write [{overrides!r}]")
    if isinstance(overrides, type):
        name = overrides.__name__
        raise ConfigError("overrides", name, "is a class, expected a list or a mapping", f"write task={name}")
    if isinstance(overrides, Mapping):
        # an argument of the task is usually new, for which Hydra wants a plus sign
        keys = {key: f"++{key}" if str(key).startswith("task.") else key for key in overrides}
        return [f"{keys[key]}={_in_hydra_grammar(str(key), value)}" for key, value in overrides.items()]
    words = [str(word) for word in overrides]
    for word in words:
        if word.startswith("-"):
            raise ConfigError("overrides", word, "is a flag of the command line, expected KEY=VALUE", _substitute(word))
    return words


def _substitute(flag: str) -> str:
    """Return what replaces a flag of the command in Python."""
    match flag.partition("=")[0]:
        case "-m" | "--multirun":
            return f"call hpctrain.submit for each value, or type the command ({page('how_to/sweep.md')})"
        case "-cd" | "--config-dir":
            return "write compose(..., config_dir=FOLDER)"
    return "leave it out"


def _in_hydra_grammar(key: str, value: object) -> str:
    """Spell a value in Hydra's grammar."""
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():
        value = item()  # a number of NumPy or torch becomes Python's
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            # a subclass may have another repr
            return repr(int(value) if isinstance(value, int) else float(value))
        case str() | PurePath():
            return QuotedString(str(value), Quote.single).with_quotes()
        case Mapping():
            pairs = [f"{_plain_key(key, name)}:{_in_hydra_grammar(key, inside)}" for name, inside in value.items()]
            return "{" + ",".join(pairs) + "}"
        case list() | tuple():
            return "[" + ",".join(_in_hydra_grammar(key, inside) for inside in value) + "]"
    problem = f"is a {type(value).__name__}, which a configuration can't hold"
    raise ConfigError(key, value, problem, "use strings, numbers, booleans, None, lists and mappings")


def _plain_key(key: str, name: object) -> str:
    if isinstance(name, str) and PLAIN_KEY.fullmatch(name):
        return name
    problem = f"has the key {name!r}, which isn't a plain word"
    raise ConfigError(key, "{...}", problem, "use letters, digits and _ - . / in keys, with a letter or _ first")
