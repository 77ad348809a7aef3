"""``conf/resume``: what may change when a run is resumed. Owner: hpctrain.launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Resume:
    """Keys that don't decide the weights (cluster, logger, length, ...) may always change."""

    allow_config_change: bool = False
    """Resume even if keys changed that decide the weights; the run is then no longer exact."""
    from_scratch: bool = False
    """If no intact checkpoint is left of a run that has saved some, train from step 0 again. Counts for this resume
    alone, and moves the metrics so far to `earlier/`."""
