"""``cluster.requeue``: how often a run is continued automatically, by cause. Owner: hpctrain.run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Requeue(require.Checked):
    """Budgets over the whole run; hpctrain never requeues a cancelled run or a task's own error."""

    prefix = "cluster.requeue."

    max_preemptions: Annotated[int | None, require.at_least(0)] = None
    """Preemptions after which the run ends; null: no limit."""
    max_time_limits: Annotated[int | None, require.at_least(0)] = None
    """Time limits after which the run ends; null: no limit."""
    max_failures: Annotated[int, require.at_least(0)] = 3
    """Hangs, infrastructure errors and out-of-memory kills, in total, after which the run is still continued."""
    max_stalled_attempts: Annotated[int, require.at_least(1)] = 2
    """Consecutive attempts without a new step after which the run ends; preemption and node failure don't count."""
