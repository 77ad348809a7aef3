"""What a rank does, and how long it may take without a sign of life."""

from __future__ import annotations

from enum import Enum

from hpctrain.config.health import Health


class Phase(Enum):
    """What a rank does: its bound, the key that sets it, and what is missed when it is over."""

    START = ("start_bound_s", "health.start_timeout_s", "start-up and no first step for")
    TRAINING = ("hang_timeout_s", "health.hang_timeout_s", "no step for")
    EVALUATION = ("eval_bound_s", "health.eval_timeout_s", "no evaluated batch for")
    SAVING = ("save_bound_s", "health.save_timeout_s", "a save that didn't end for")

    def __init__(self, bound: str, key: str, missed: str) -> None:
        self._bound, self._key, self._missed = bound, key, missed

    @classmethod
    def of(cls, doing: str) -> Phase:
        """The phase in which a rank is, by what its `Times` count."""
        return {"train_s": cls.TRAINING, "eval_s": cls.EVALUATION, "save_s": cls.SAVING}.get(doing, cls.START)

    def bound_s(self, health: Health) -> float:
        """Seconds of silence that are allowed."""
        seconds: float = getattr(health, self._bound)
        return seconds

    def complaint(self, health: Health) -> str:
        """What is wrong when the bound is over, and the key that sets it."""
        return f"{self._missed} {self.bound_s(health):g} s ({self._key})"
