"""The site file: what worked, as an option of `cluster`."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpctrain.config.cluster import Requeue, Slurm

FOLDER = Path("conf") / "cluster"
"""Where options of a user's own are found, below the folder where commands are typed."""
TAKEN = frozenset({"slurm", "local"})
LEFT_OUT = frozenset({"kind", "wait", "dry_run", "master_port"})
"""Keys that belong to a command, not to a site."""


def site_name(cluster: str) -> str:
    """A name for the option, from that of the cluster."""
    name = re.sub(r"[^a-z0-9_]+", "_", cluster.lower()).strip("_") or "site"
    return f"{name}_site" if name in TAKEN else name


def site_keys(cluster: Slurm, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that differ from hpctrain's defaults.

    Args:
        cluster: of the examined request.
        changes: what the examination found out, by key.
    """
    usual = Slurm()
    own = {
        field.name: getattr(cluster, field.name)
        for field in dataclasses.fields(cluster)
        if field.name not in LEFT_OUT and getattr(cluster, field.name) != getattr(usual, field.name)
    }
    found = {**own, **changes}
    return {name: dataclasses.asdict(value) if isinstance(value, Requeue) else value for name, value in found.items()}


def site_text(keys: Mapping[str, Any], typed: str, remarks: Sequence[str]) -> str:
    """The file.

    Args:
        keys: of the cluster.
        typed: the command that made it.
        remarks: why keys are there that nobody typed.
    """
    lines = [f"# Written on {time.strftime('%Y-%m-%d')} by `{typed}`; change it as you like."]
    lines += [f"# {remark}" for remark in remarks]
    body = yaml.safe_dump({"defaults": ["slurm", "_self_"]}, sort_keys=False)
    if keys:
        body += "\n" + yaml.safe_dump(dict(keys), sort_keys=False, default_flow_style=False)
    return "\n".join(lines) + "\n" + body
