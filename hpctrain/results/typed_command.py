"""The command with which a run was launched, as its manifest has it."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import read_varied
from hpctrain.run.sweep_record import SweepRecord

_OPTION = re.compile(r"['\"]?([\w./-]+)['\"]?")
"""One option of a group, as it is typed; several are a list, or values of a sweep."""


@dataclass(frozen=True, slots=True)
class TypedCommand:
    """A command line of hpctrain.

    Attributes:
        text: as it was typed; empty if it isn't known.
        overrides: the words `KEY=VALUE`, in the order in which they were typed.
        varied: the keys that a sweep varied, with the run's values.
        config_dir: the folder of `--config-dir`, absolute; None without one.
    """

    text: str
    overrides: tuple[str, ...]
    varied: Mapping[str, str]
    config_dir: str | None

    @classmethod
    def of(cls, directory: RunDirectory) -> TypedCommand:
        """Read a run's command; one that can't be read has no words."""
        manifest = read_json_or_empty(directory.manifest)
        text = str(manifest.get("command") or "")
        try:
            words = shlex.split(text)
        except ValueError:
            words = []
        if (record := _extended_sweep(directory, words)) is not None:
            text = shlex.join(record.command)
            words = [*record.fixed, *(f"{key}={values}" for key, values in record.space.items())]
            words += [] if record.config_dir is None else [f"--config-dir={record.config_dir}"]
        words = words[: words.index("--")] if "--" in words else words
        named = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
        named += [after for word, after in itertools.pairwise(words) if word in ("--config-dir", "-cd")]
        folder = Path(str(manifest.get("folder") or "."))
        return cls(
            text=text,
            overrides=tuple(word for word in words if "=" in word and not word.startswith("-")),
            varied=read_varied(directory),
            config_dir=os.path.normpath(folder / named[-1]) if named else None,
        )

    @property
    def keys(self) -> list[str]:
        """The keys that the command set for all runs, or varied."""
        return [_split(word)[0] for word in self.overrides]

    def options(self) -> dict[str, str]:
        """Values of keys without a dot that may be options of groups: of a sweep's values, the run's own."""
        typed = {key: value for key, value in map(_split, self.overrides) if "." not in key}
        found = {**typed, **{key: value for key, value in self.varied.items() if "." not in key}}
        matches = {key: _OPTION.fullmatch(value) for key, value in found.items()}
        return {key: match[1] for key, match in matches.items() if match}

    def words_of(self, groups: tuple[str, ...]) -> list[str]:
        """The words that set keys of these groups to one value for all runs."""
        parts = ((word, _split(word)[0]) for word in self.overrides)
        return [word for word, key in parts if key.partition(".")[0] in groups and key not in self.varied]


def _extended_sweep(directory: RunDirectory, words: Sequence[str]) -> SweepRecord | None:
    """The record of the sweep, with the rest of the command, if a resume added the run to it; None otherwise."""
    if "resume" not in words[:4] or not directory.path.name.isdecimal():
        return None
    with contextlib.suppress(RunDirectoryError):
        return SweepRecord.read(directory.path.parent)
    return None


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+~").partition("=")
    return key, value
