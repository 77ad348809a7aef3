"""Hyperparameters for TensorBoard's page HParams.

The page reads them from the metadata of two summaries, `tensorboard.plugins.hparams.metadata` names them; it takes all
scalars of a run as its metrics. Importing that module would import TensorFlow where it is installed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from hpctrain.files import read_json_or_empty
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory

START_TAG = "_hparams_/session_start_info"
END_TAG = "_hparams_/session_end_info"
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


def add_start(summary: Any, values: Mapping[str, str | float | bool], time: float) -> None:
    """Add the start of a session, with its hyperparameters, to an event's summary.

    Args:
        summary: of the event.
        values: by key.
        time: epoch seconds.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData(version=0)
    start = data.session_start_info
    start.start_time_secs = time
    for key, value in values.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    _add(summary, START_TAG, data)


def add_end(summary: Any, time: float) -> None:
    """Add the successful end of a session to an event's summary.

    Args:
        summary: of the event.
        time: epoch seconds.
    """
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData(version=0)
    data.session_end_info.status = STATUS_SUCCESS
    data.session_end_info.end_time_secs = time
    _add(summary, END_TAG, data)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _add(summary: Any, tag: str, data: Any) -> None:
    value = summary.value.add(tag=tag)
    value.metadata.plugin_data.plugin_name = "hparams"
    value.metadata.plugin_data.content = data.SerializeToString()
    # since 2.0 the page looks for summaries with a tensor, whatever it is
    value.tensor.dtype = 1  # DT_FLOAT
    value.tensor.tensor_shape.dim.add(size=0)
