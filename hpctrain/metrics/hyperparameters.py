"""Hyperparameters of a run, for TensorBoard's page HParams, which takes all scalars of the run as its metrics."""

from __future__ import annotations

import json
import shlex

from hpctrain.files import read_json_or_empty
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory

NOT_OF_THE_TRAINING = (
    *("run_dir", "run_mode", "name", "nodes", "after", "after_failure"),
    *("cluster", "logger", "health", "notify", "resume", "checkpoint"),
)
"""Keys and groups of keys that say where a run is trained and stored, and not what."""
MOST_CHARS = 200
"""Characters of a value; the page shows it in a cell."""


def hyperparameters(directory: RunDirectory) -> dict[str, str | float | bool]:
    """Return the keys that the run's sweep varied, or without a sweep those that its command set, with their values."""
    typed = trained_varied(directory)
    if not typed:
        command = str(read_json_or_empty(directory.manifest).get("command", ""))
        words = (word.lstrip("+").partition("=") for word in _words(command) if not word.startswith("-"))
        typed = {key: value for key, equals, value in words if equals}
    of_training = {key: value for key, value in typed.items() if key.partition(".")[0] not in NOT_OF_THE_TRAINING}
    return {key: parsed(value) for key, value in of_training.items()}


def parsed(typed: str) -> str | float | bool:
    """Return a number or a truth value if the text is one, else the text."""
    try:
        value = json.loads(typed)
    except ValueError:
        try:
            return float(typed)
        except ValueError:
            return typed[:MOST_CHARS]
    return value if isinstance(value, bool | int | float) else typed[:MOST_CHARS]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []
