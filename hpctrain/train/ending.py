"""The early end of a run: asked for by a callback, or by `trainer.max_time_min`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.attempt.outcome import TIME_BOUND
from hpctrain.checkpoint.state import Stateful
from hpctrain.config.root import Config
from hpctrain.phrases import duration
from hpctrain.rank.world import World

log = logging.getLogger("hpctrain.train")


class Ending(Stateful):
    """The decision to end a run before its last step. Rank zero makes it, and the other ranks follow.

    The decision is part of the checkpoint. It holds until the configuration of the callbacks changes, if a callback has
    made it; whether the time is over is decided again in each attempt.

    Args:
        config: of the run.
        world: the ranks.
        clock: monotonic seconds.

    Attributes:
        requested: whether this rank is rank zero, and wants the run to end.
        is_timed: whether this rank has to look at the clock.
        reason: why the run ends, in one line; empty while it doesn't. Set on every rank once they have agreed.
        evaluated_step: step of the last complete evaluation; None before the first.
        recorded_step: step of the record that such an end has added to the metrics; None without one.
        concluded: whether everything that such an end requires is in the checkpoint of this step.
    """

    def __init__(self, config: Config, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        max_time_min = config.trainer.max_time_min
        self.requested = False
        self.is_timed = max_time_min is not None and world.is_rank_zero
        self.reason = ""
        self.evaluated_step: int | None = None
        self.recorded_step: int | None = None
        self.concluded = False
        self._callbacks = config.callbacks
        self._world = world
        self._clock = clock
        self._max_time_min = max_time_min
        self._max_time_s = (max_time_min or 0.0) * 60
        self._by_callback = False
        self._trained_before_s = 0.0
        self._began = clock()

    @property
    def trained_s(self) -> float:
        """Seconds of training in all attempts, without what a killed attempt trained after its last checkpoint."""
        return self._trained_before_s + self._clock() - self._began

    def begin(self) -> None:
        """Count the training time of this attempt from now on."""
        self._began = self._clock()

    def request(self, reason: str, *, callback: str) -> None:
        """Ask for the end of the run after this step; only rank zero's first request counts.

        Args:
            reason: in one line.
            callback: the name of its entry in the configuration.
        """
        if self._world.is_rank_zero and not self.requested:
            self.requested = True
            self.reason = f"{callback}: {' '.join(reason.split())}"
            self._by_callback = True

    def look_at_clock(self) -> None:
        """Ask for the end of the run if its training time is over; only where `is_timed`."""
        if not self.requested and self.trained_s >= self._max_time_s:
            self.requested = True
            self.reason = f"{TIME_BOUND}={self._max_time_min:g}: the run has trained for {duration(self.trained_s)}"

    def agree(self) -> bool:
        """Return whether rank zero wants the run to end, and share its reason; collective."""
        self.reason = str(self._world.broadcast(self.reason if self.requested else ""))
        return bool(self.reason)

    def state(self) -> dict[str, Any]:
        """Return the decision and the training time so far."""
        decided = {"reason": self.reason, "callbacks": self._callbacks} if self._by_callback else {}
        ending = {
            "trained_s": self.trained_s,
            "evaluated_step": self.evaluated_step,
            "recorded_step": self.recorded_step,
            "concluded": self.concluded,
            **decided,
        }
        return {"ending": ending}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the decision, unless the callbacks that made it have changed, and the training time."""
        state = saved.get("ending", {})
        self._trained_before_s = float(state.get("trained_s", 0.0))
        self.evaluated_step = state.get("evaluated_step")
        self.recorded_step = state.get("recorded_step")
        self.concluded = bool(state.get("concluded", False))
        if not self._world.is_rank_zero or "reason" not in state:
            return
        if state["callbacks"] != self._callbacks:
            log.info("the run ended early before (%s); the callbacks have changed, so it continues", state["reason"])
            return
        self.requested = True
        self._by_callback = True
        self.reason = state["reason"]
