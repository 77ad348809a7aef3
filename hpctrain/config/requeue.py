"""``cluster.requeue``: how often a run goes on by itself, by cause. Owner: hpctrain.run."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Requeue:
    """Budgets over the whole run; a cancelled run and an error of the task's own are never requeued."""

    max_preemptions: int | None = None
    """Preemptions after which the run ends; null: no bound."""
    max_time_limits: int | None = None
    """Time limits after which the run ends; null: no bound."""
    max_failures: int = 3
    """Hangs, infrastructure errors and out-of-memory kills, together, that are survived."""
    max_stalled_attempts: int = 2
    """Attempts in a row without a step gained after which the run ends; preemption and node failure don't count."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("cluster.requeue.max_preemptions", self.max_preemptions, 0)
        require.at_least("cluster.requeue.max_time_limits", self.max_time_limits, 0)
        require.at_least("cluster.requeue.max_failures", self.max_failures, 0)
        require.at_least("cluster.requeue.max_stalled_attempts", self.max_stalled_attempts, 1)
