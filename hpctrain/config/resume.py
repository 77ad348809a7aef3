"""``conf/resume``: what may change when a run goes on. Owner: hpctrain.launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Resume:
    """Keys that don't touch the weights (cluster, logger, how long ...) may always change."""

    allow_config_change: bool = False
    """Go on although keys changed that decide the weights; the run is then no longer exact."""
