"""From one attempt to the next: what is saved, and how it is taken up again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.best import best_for
from hpctrain.checkpoint.collective_load import load_together
from hpctrain.checkpoint.interval import best_interval_s, mean_time_between_failures_s
from hpctrain.checkpoint.reader import LoadedCheckpoint
from hpctrain.checkpoint.removal import remove_leftovers
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.state import Head, Snapshot, capture, held_bytes
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.config.identity import config_digest
from hpctrain.config.root import Config
from hpctrain.distributed.determinism import rank_seed, seed_everything
from hpctrain.distributed.replica import settle_buckets
from hpctrain.distributed.stop_request import StopRequest
from hpctrain.distributed.world import World
from hpctrain.errors import CheckpointError, SupersededError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.train.parts import Parts

FIRST_AUTO_SAVE_S = 60.0
"""With checkpoint.auto the first save comes early: its cost has to be measured."""

log = logging.getLogger("hpctrain.train")


class Continuity:
    """Saves the parts, and takes them up from the newest intact checkpoint.

    Args:
        config: of the run.
        directory: of the run.
        world: the ranks.
        parts: what is saved.
        stop: told of a write that failed beside training.
        require_ownership: raises SupersededError once a later attempt owns the run.

    Attributes:
        evaluation_due: the checkpoint was taken before its step's evaluation was done.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        parts: Parts,
        *,
        stop: StopRequest,
        require_ownership: Callable[[], None],
    ) -> None:
        self._config, self._directory, self._world, self._parts = config, directory, world, parts
        self._stop = stop
        self._require_ownership = require_ownership
        policy = config.checkpoint
        retention = Retention(keep=policy.keep, keep_every=policy.keep_every, keep_best=policy.keep_best)
        self._saver = CheckpointSaver(
            CheckpointWriter(directory, require_ownership, retention, safetensors=policy.safetensors),
            background=policy.asynchronous,
            verify_after=policy.verify == "after_save",
            on_failure=self._save_failed,
        )
        self._best = best_for(policy, parts.task.metric, parts.task.metric_mode)
        self._best_step: int | None = None
        self.evaluation_due = False

    def take_up(self) -> int:
        """Restore the newest intact checkpoint; collective.

        Returns:
            The step to go on from; 0 for a new run.

        Raises:
            SupersededError: a later attempt owns the run; on rank zero, before anything is changed.
        """
        self._clear_leftovers()
        found = load_together(self._directory, self._world)
        step = 0
        if found is not None:
            step = self._restore(found)
        settle_buckets(self._parts.model, self._world, self._throwaway)
        if found is not None:
            # last, since whatever is built and run before it draws from the same streams
            self._restore_random_state(found)
            if self._world.is_rank_zero:
                self._saver.tidy(found.step)
        return step

    def _clear_leftovers(self) -> None:
        """End on rank zero what dead attempts left half done."""
        if not self._world.is_rank_zero:
            return
        self._require_ownership()
        if names := remove_leftovers(self._directory):
            log.info("cleared what an earlier attempt left unfinished: %s", ", ".join(names))

    def _restore(self, found: LoadedCheckpoint) -> int:
        parts, changed = self._parts, self._changed_options(found)
        found.restore(parts.module, parts.optimizer, parts.scaler, changed=changed)
        self._parts.update.num_skipped = int(found.extra.get("skipped_updates", 0))
        self.evaluation_due = bool(found.extra.get("evaluation_due", False))
        self._parts.meter.load_state(found.extra.get("meter", {}), rank=self._world.rank)
        if self._parts.ema is not None:
            self._parts.ema.load_state(found.extra.get("ema", {}))
        if self._best is not None:
            self._best.load_state(found.extra.get("best", {}))
        if self._world.is_rank_zero:
            log.info("resuming at step %d from %s", found.step, found.path)
            if found.config_digest != config_digest(self._config):
                log.warning("keys that decide the weights have changed since step %d: the run is not exact", found.step)
        return found.step

    def _changed_options(self, found: LoadedCheckpoint) -> set[str]:
        """Keys of the optimizer whose values aren't those that the checkpoint was written under."""
        if found.config_digest == config_digest(self._config):
            return set()
        before, now = found.extra.get("optimizer", {}), self._config.optimizer
        return {key for key in (*before, *now) if before.get(key) != now.get(key)}

    def judge(self, step: int, means: Mapping[str, float]) -> bool:
        """Take an evaluation in; whether a save is to follow, since it is among the best; collective.

        Args:
            step: completed steps.
            means: by name as it is logged; the same on every rank.

        Raises:
            ConfigError: the metric that the best are kept by isn't among them.
        """
        if self._best is None:
            return False
        among_the_best = self._best.judge(step, means)
        if not self._config.checkpoint.keep_best or not self._world.broadcast(among_the_best):
            return False
        self._best_step = step
        return True

    def _restore_random_state(self, found: LoadedCheckpoint) -> None:
        if found.world_size == self._world.size:
            restore_rng(found.rng[self._world.rank], self._world.gpus or None)
        else:
            # another world size draws other numbers anyway; the same ones each time
            seed_everything(rank_seed(self._config.seed + found.step, self._world.rank))

    def _throwaway(self) -> None:
        with closing(iter(self._parts.loader(0))) as micro_batches:
            self._parts.step.throwaway(next(micro_batches))

    def save(self, step: int, evaluation_due: bool, wait: bool) -> None:
        """Save the state after ``step`` steps; collective.

        Args:
            step: completed steps.
            evaluation_due: they are yet to be evaluated.
            wait: until it is durable; otherwise the save is left out where the one before is still being written,
                unless it is one of the best.

        Raises:
            CheckpointError: the file system refused, and checkpoint.on_error doesn't let that pass.
            SupersededError: a later attempt owns the run.
        """
        world = self._world
        if not wait and world.broadcast(self._saver.busy):
            if step != self._best_step:
                if world.is_rank_zero:
                    log.warning("no checkpoint of step %d: the one before is still being written", step)
                return
            if world.is_rank_zero:
                log.info("the checkpoint of step %d is one of the best: it waits for the one before", step)
        random_states = world.gather(rng_state(self._world.gpus or None))
        meter = self._parts.meter.state()
        error: Exception | None = None
        if world.is_rank_zero:
            extra = {"meter": meter, "evaluation_due": evaluation_due}
            moment = _Moment(self._parts, self._head(step), random_states or [], {**self._extra(), **extra})
            try:
                # a save at the end of an attempt may have seconds: the next attempt tidies up
                self._saver.save(moment, wait=wait, retain=not wait or step == self._parts.total_steps)
            except Exception as caught:
                # every rank must learn of it before any of them raises
                error = caught
        # a MemoryError has no words, and is one all the same
        told = None if error is None else str(error) or repr(error)
        told, tolerable = world.broadcast((told, self._tolerable(error, step)))
        if told is not None and not tolerable:
            raise error or CheckpointError(
                f"rank zero could not write the checkpoint of step {step}: {told}", elsewhere=True
            )
        if error is not None:
            log.warning("the run goes on without a checkpoint of step %d: %s", step, told)

    def _tolerable(self, error: Exception | None, step: int) -> bool:
        """Whether the run may go on without this save: never at its end, nor when it is another attempt's by now."""
        warns = self._config.checkpoint.on_error == "warn"
        return warns and step < self._parts.total_steps and not isinstance(error, SupersededError)

    def _save_failed(self, error: Exception) -> bool:
        """Take up the error of a write that nobody waits for, in the writing thread; whether that settles it."""
        if self._config.checkpoint.on_error == "fail" or isinstance(error, SupersededError):
            self._stop.fail(error)
            return False
        log.warning("training goes on; the next save will be tried as ever: %s", error)
        return True

    def save_interval_s(self) -> float | None:
        """Seconds between saves; None: not by time, or not by this rank's clock, but by rank zero's."""
        policy = self._config.checkpoint
        if not self._world.is_rank_zero:
            return None
        if not policy.auto:
            return None if policy.every_min is None else policy.every_min * 60
        if not self._saver.stall_s:
            return FIRST_AUTO_SAVE_S
        mtbf_s = mean_time_between_failures_s(Ledger(self._directory).attempts(), time.time())
        stall_s, takes_s = self._saver.stall_s, self._saver.takes_s
        # one save at a time: the next may not be due before this one is written
        interval_s = max(best_interval_s(stall_s, mtbf_s), takes_s)
        log.info(
            "a save every %.0f s: it costs %.2f s, is written within %.1f s, and one failure in %.1f h is expected",
            interval_s,
            stall_s,
            takes_s,
            mtbf_s / 3600,
        )
        return interval_s

    @property
    def save_takes_s(self) -> float:
        """Seconds that a save would take now, from the copy to the disk, by the longest so far; rank zero's to know."""
        return self._saver.takes_s

    def _head(self, step: int) -> Head:
        return Head(
            step=step,
            samples_seen=self._parts.plan.samples_seen(step),
            world_size=self._world.size,
            config_digest=config_digest(self._config),
            score=None if self._best is None else self._best.at(step),
        )

    def _extra(self) -> dict[str, object]:
        return {
            "optimizer": self._config.optimizer,
            "skipped_updates": self._parts.update.num_skipped,
            "ema": {} if self._parts.ema is None else self._parts.ema.state(),
            "best": {} if self._best is None else self._best.state(),
        }

    def finish(self) -> None:
        """Wait for the write in flight, and tell of its error; not collective."""
        self._saver.finish()

    def give_time(self, seconds: float) -> None:
        """Wait for the write in flight, but no longer than this; not collective."""
        self._saver.give_time(seconds)


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is saved, between two steps; a `Source` of `CheckpointSaver`."""

    parts: Parts
    head: Head
    random_states: list[object]
    extra: Mapping[str, Any]

    def held_bytes(self) -> int:
        return held_bytes(self.parts.module, self.parts.optimizer, self.extra)

    def capture(self, into: Snapshot | None, *, copied: bool) -> Snapshot:
        return capture(
            self.parts.module,
            self.parts.optimizer,
            self.parts.scaler,
            self.extra,
            head=self.head,
            rng=self.random_states,
            into=into,
            copied=copied,
        )
