"""A resume's change to a run's configuration: kept once an attempt has trained a step with it, otherwise reverted.

Until then, `config.before.yaml` holds the previous configuration. `config_changes.jsonl` keeps the values with which
the steps before a change were trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.files import append_json_line, read_bytes, read_json_lines, write_atomic
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import read_varied, value_text
from hpctrain.run.record_fields import COUNT


def change_config(directory: RunDirectory, text: str) -> None:
    """Store a configuration, and keep the one before it until an attempt trains with it; the same one is no change.

    Raises:
        OSError: it can't be written; the stored one is unchanged.
    """
    # after a resume that was cancelled in the queue, the file is there already: keep it, the last one that worked
    if directory.config.exists() and not directory.config_before.exists():
        status, before = directory.config.stat(), read_bytes(directory.config)
        if before != text.encode():
            write_atomic(directory.config_before, before)
            # `status` sorts the runs by it
            os.utime(directory.config_before, ns=(status.st_atime_ns, status.st_mtime_ns))
    write_atomic(directory.config, text)


def trained_config(directory: RunDirectory) -> Path:
    """The file of the configuration with which the run last trained."""
    return directory.config_before if directory.config_before.exists() else directory.config


def keep_config(directory: RunDirectory, step: int | None = None) -> None:
    """Keep the change, and record it, once an attempt has trained with it.

    Also record that an attempt repeats steps before an earlier change, as one from an older checkpoint does.

    Args:
        directory: of the run.
        step: the last step before the change; None for a program that reports no steps.
    """
    # a read-only file system for a moment must not stop an attempt
    with contextlib.suppress(OSError):
        changed = _recorded_changes(directory) if directory.config_before.exists() else {}
        if step is not None:
            values = {key: texts[-1] for key, texts in _values_by_step(directory).items() if key not in changed}
            changed |= {key: (last, last) for key, (last, since) in values.items() if (since or 0) > step}
        if changed:
            before, after = ({key: pair[n] for key, pair in changed.items()} for n in (0, 1))
            record = {"step": step, "time": round(time.time(), 3), "before": before, "after": after}
            append_json_line(directory.config_changes, json.loads(json.dumps(record, default=str)), durable=True)
        directory.config_before.unlink(missing_ok=True)


def changes_weights(directory: RunDirectory) -> bool:
    """Whether the change is of a key that decides the weights, or that the run's sweep varied."""
    return bool(_recorded_changes(directory))


def _recorded_changes(directory: RunDirectory) -> dict[str, tuple[Any, Any]]:
    """The changed values that decide the weights or that the run's sweep varied, by key: before and after."""
    from hpctrain.config.root import decides_the_weights  # the schema is slow to import for `status`

    before, after = map(_values, (directory.config_before, directory.config))
    varied = read_varied(directory)
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and (decides_the_weights(key) or _is_of(key, varied))
    }


def _values(path: Path) -> dict[str, Any]:
    from hpctrain.config.root import flat_values, stored_texts

    plain = read_plain_config(path)
    return flat_values(plain) | stored_texts(plain)


def _is_of(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def changed_values(directory: RunDirectory) -> dict[str, str]:
    """By key, the values with which a run was trained, if they changed: ``0.001 until step 10, then 0.003``."""
    return {key: _text(values) for key, values in _values_by_step(directory).items() if len(values) > 1}


def trained_varied(directory: RunDirectory) -> dict[str, str]:
    """The keys that a run's sweep varied, with the values with which the run was trained; empty without a sweep."""
    varied = read_varied(directory)
    changes = _values_by_step(directory) if varied else {}
    for key in varied:
        if key in changes:
            varied[key] = _text(changes[key])
        elif any(_is_of(changed, [key]) for changed in changes):  # options of a group
            varied[key] += " (changed)"
    return varied


def _values_by_step(directory: RunDirectory) -> dict[str, list[tuple[Any, int | None]]]:
    """By changed key, the values in order, each with the step after which it was used."""
    by_key: dict[str, list[tuple[Any, int | None]]] = {}
    try:
        records = list(read_json_lines(directory.config_changes))
    except OSError:
        return {}
    for record in records:
        step, before, after = (record.get(name) for name in ("step", "before", "after"))
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue  # edited by hand
        step = step if COUNT.accepts(step) else None
        for key in dict.fromkeys([*before, *after]):
            values = by_key.setdefault(key, [(before.get(key), 0)])
            # a resume from an earlier step repeats the steps after it
            while values and step is not None and (values[-1][1] or 0) >= step:
                values.pop()
            if not values or values[-1][0] != after.get(key):
                values.append((after.get(key), step))
    return by_key


def _text(values: list[tuple[Any, int | None]]) -> str:
    texts = [value_text(value) for value, _ in values]
    ends = ["" if step is None else f" until step {step}" for _, step in values[1:]]
    earlier = [f"{text}{end}" for text, end in zip(texts, ends, strict=False)]
    return f"{', '.join(earlier)}, then {texts[-1]}" if earlier else texts[-1]


def revert_config(directory: RunDirectory) -> bool:
    """Revert the change; return whether there was one.

    Raises:
        OSError: the file system's error.
    """
    try:
        changed = read_bytes(directory.config_before) != read_bytes(directory.config)
        directory.config_before.replace(directory.config)
    except FileNotFoundError:
        return False
    return changed
