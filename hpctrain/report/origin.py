"""The origin of a run: its configuration, its code and its environment."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from hpctrain.config.plain_yaml import may_be_secret
from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.phrases import byte_size, counted, local_time
from hpctrain.report.page import Markup, descriptions, element, folded, joined, remark
from hpctrain.run.code import code_records
from hpctrain.run.config_change import changed_values
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import TIME
from hpctrain.sync.sent_run import describe

MOST_CHARS = 40_000
"""Characters of a configuration or a diff that the page holds."""


def configuration(directory: RunDirectory) -> Markup:
    """The configuration, by full key; without variables of the environment, which may be secret."""
    description = describe(directory, "")
    if not description.config:
        return remark("config.yaml can't be read.")
    changed = changed_values(directory)
    values = {key: changed.get(key, value) for key, value in description.config.items()}
    text = "\n".join(f"{key}={_value_text(value)}" for key, value in values.items())
    note = "The variables in cluster.env and the commands in cluster.setup aren't shown: they may hold secrets."
    keys = folded(f"All {counted(len(description.config), 'key')}", _cut(text), remark(note))
    command = descriptions([("command", description.origin.get("command", ""))])
    return joined([command, descriptions([*description.varied.items()]), keys])


def code(directory: RunDirectory) -> Markup:
    """The copy of the code, and the state of the git repository when the run was launched."""
    manifest = read_json_or_empty(directory.manifest)
    git = manifest.get("git")
    git = git if isinstance(git, dict) else {}
    record: dict[str, Any] = {}
    with contextlib.suppress(OSError, RunDirectoryError):
        record = next(reversed(list(code_records(directory))), {})
    copy = ""
    if record.get("digest"):
        size = f"{counted(record['files'], 'file')}, {byte_size(record['bytes'])}"
        copy = f"{record['digest']} ({size}), taken from {record['root']}, {local_time(record.get('time') or 0)}"
    diff = str(git.get("diff") or "")
    changes = f"{counted(len(diff.splitlines()), 'line')} of diff" if diff else "none" if git else ""
    if git.get("diff_left_out"):
        changes = "there were some, or they couldn't be read; the manifest leaves them out"
    pairs = [("copy", copy), ("git commit", str(git.get("commit") or "")), ("changes", changes)]
    summary = descriptions(pairs) or remark("No copy of the code, and no git repository.")
    return joined([summary, folded("Changes against the commit", _cut(diff), long=True) if diff else ""])


def environment(directory: RunDirectory) -> Markup:
    """Versions, host, user and folders."""
    manifest = read_json_or_empty(directory.manifest)
    versions = manifest.get("versions")
    pairs = [(str(name), str(value)) for name, value in versions.items()] if isinstance(versions, dict) else []
    launch_time = manifest.get("time")
    when = local_time(float(launch_time or 0)) if TIME.accepts(launch_time) else ""
    host_pairs = [(name, str(manifest.get(name) or "")) for name in ("host", "user", "folder", "executable")]
    return descriptions([("launched", when), *host_pairs, *pairs]) or remark("manifest.json can't be read.")


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key, those that may be secret replaced by stars: a page is sent to others."""
    return {key: "***" if may_be_secret(key) else value for key, value in values.items()}


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cut(text: str) -> Markup:
    left_out = len(text) - MOST_CHARS
    note = remark(f"{left_out} more characters aren't shown.") if left_out > 0 else ""
    return joined([element("pre", text[:MOST_CHARS]), note])
