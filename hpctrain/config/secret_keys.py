"""Keys whose values may be secret: they stay on the cluster."""

from __future__ import annotations

MAY_BE_SECRET = ("cluster.env", "cluster.container.env", "cluster.setup", "notify.command")
"""Keys that, with those below them, are neither sent to services nor shown in reports."""


def may_be_secret(key: str) -> bool:
    """Return whether a key is one of them, however many plus signs precede it."""
    key = key.lstrip("+")
    return any(key == name or key.startswith(f"{name}.") for name in MAY_BE_SECRET)
