"""Which checkpoints go, once a newer one is safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.run.checkpoints import CheckpointInfo
from hpctrain.run.score import best_steps

ALWAYS_KEPT = 2
"""So many of the newest intact checkpoints stay, whatever the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays of the intact checkpoints.

    Attributes:
        keep: newest ones; the last two always do.
        keep_every: those whose step is a multiple of it, for good; None keeps none so.
        keep_best: those with the best scores.
    """

    keep: int = ALWAYS_KEPT
    keep_every: int | None = None
    keep_best: int = 0

    def steps_to_remove(self, found: Sequence[CheckpointInfo]) -> list[int]:
        """The steps whose checkpoints are to be removed, oldest first.

        Damaged ones stay as evidence until the newest `ALWAYS_KEPT` intact ones are all newer. One without a readable
        manifest can't be shown to be ours, and stays for good.

        Args:
            found: in any order.
        """
        intact = sorted((info.step for info in found if info.intact), reverse=True)
        kept = set(intact[: max(self.keep, ALWAYS_KEPT)])
        if self.keep_every is not None:
            kept.update(step for step in intact if step % self.keep_every == 0)
        kept.update(best_steps({info.step: info.score for info in found if info.intact}, self.keep_best))
        overtaken = intact[ALWAYS_KEPT - 1] if len(intact) >= ALWAYS_KEPT else -1
        damaged = [info.step for info in found if not info.intact and info.weights_digest is not None]
        return sorted([step for step in intact if step not in kept] + [step for step in damaged if step < overtaken])
