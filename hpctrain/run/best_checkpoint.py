"""The checkpoint with the best score; that of the run's best evaluation may not be on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.errors import CheckpointError
from hpctrain.run.checkpoints import CheckpointInfo, list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import last_evaluation
from hpctrain.run.score import Score, best_steps

KEEP_BEST = "checkpoint.keep_best"


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best of a run's checkpoints.

    Attributes:
        info: the checkpoint with the best score; None if none has a score.
        warning: if the checkpoint of the best evaluation isn't on disk, a line on that; else empty.
    """

    info: CheckpointInfo | None
    warning: str

    @classmethod
    def of(cls, directory: RunDirectory, checkpoints: Sequence[CheckpointInfo] | None = None) -> BestCheckpoint:
        """Find the best checkpoint of a run.

        Args:
            directory: of the run.
            checkpoints: of the run, if the caller has listed them already.
        """
        if checkpoints is None:
            checkpoints = list_checkpoints(directory, verify=False)
        scored = {info.step: info for info in checkpoints if info.intact}
        steps = best_steps({step: info.score for step, info in scored.items()}, 1)
        best = scored[steps[0]] if steps else None
        evaluation = last_evaluation(directory)
        top = None if evaluation is None else evaluation.best
        if evaluation is None or top is None or (best is not None and _is_best(best, top, evaluation.best_step)):
            return cls(best, "")
        on_disk = "no checkpoint has a score" if best is None else f"the best checkpoint on disk is {_described(best)}"
        policy = read_plain_values(directory.config, (KEEP_BEST,)).get(KEEP_BEST)
        advice = f" ({KEEP_BEST}=0; set it to 1 to keep the best)" if policy == 0 else ""
        at = f"{top.name} {top.value:.6g} at step {evaluation.best_step}"
        is_damaged = any(info.step == evaluation.best_step for info in checkpoints)
        lacks = "isn't intact" if is_damaged else f"isn't on disk{advice}"
        return cls(best, f"the best evaluation is {at}, whose checkpoint {lacks}; {on_disk}")

    def require(self, directory: RunDirectory) -> CheckpointInfo:
        """Return the best checkpoint of the run.

        Raises:
            CheckpointError: none has a score.
        """
        if self.info is None:
            why = self.warning or f"no checkpoint has a score; {KEEP_BEST}=1 keeps the best of a run that evaluates"
            raise CheckpointError(f"{directory.path}: {why}")
        return self.info


def _is_best(info: CheckpointInfo, top: Score, step: int | None) -> bool:
    score = info.score
    if score is None or (score.name, score.mode) != (top.name, top.mode):
        return False
    # a better one was saved by an attempt whose steps were repeated
    return info.step == step or score.loss < top.loss


def _described(info: CheckpointInfo) -> str:
    assert info.score is not None
    return f"that of step {info.step}, with {info.score.name} {info.score.value:.6g}"
