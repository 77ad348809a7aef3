"""``cluster.requeue``: how often a run is continued automatically, by cause. Owner: hpctrain.run."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Requeue:
    """Budgets over the whole run; hpctrain never requeues a cancelled run or a task's own error."""

    max_preemptions: int | None = None
    """Preemptions after which the run ends; null: no limit."""
    max_time_limits: int | None = None
    """Time limits after which the run ends; null: no limit."""
    max_failures: int = 3
    """Hangs, infrastructure errors and out-of-memory kills, in total, after which the run is still continued."""
    max_stalled_attempts: int = 2
    """Consecutive attempts without a new step after which the run ends; preemption and node failure don't count."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("cluster.requeue.max_preemptions", self.max_preemptions, 0)
        require.at_least("cluster.requeue.max_time_limits", self.max_time_limits, 0)
        require.at_least("cluster.requeue.max_failures", self.max_failures, 0)
        require.at_least("cluster.requeue.max_stalled_attempts", self.max_stalled_attempts, 1)
