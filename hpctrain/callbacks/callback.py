"""The contract between a callback and the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.callbacks.training import Training


class Callback:
    """Watches a training, and may end it. Subclass it anywhere, and name the class in a file of conf/callbacks.

    Its constructor takes plain values from that file, or from the command line, and runs in every rank. Override the
    hooks that you need; the others cost nothing. Hooks run on every rank, in the order in which the configuration lists
    the callbacks, so they may be collective. They don't run in passes that leave no trace, such as the evaluation
    before the first step. An error in a hook ends the run as `failed`.

    A callback that changes attributes of its own also overrides `state_dict` and `load_state_dict`. Every checkpoint
    holds the state of rank zero's callbacks, and every rank gets it on a resume. A random number that a hook draws
    changes the numbers that training draws after it; draw it from a generator of your own.

    Example:
        ``callbacks=[slow_steps]`` with a file ``conf/callbacks/slow_steps.yaml``, whose content is
        ``slow_steps: {_target_: mine.SlowSteps, limit_s: 2}``::

            class SlowSteps(Callback):
                def __init__(self, limit_s):
                    self.limit_s = limit_s

                def before_step(self, training):
                    self.began = time.monotonic()

                def after_step(self, training):
                    if time.monotonic() - self.began > self.limit_s:
                        print("slow:", training.position.step)
    """

    def on_start(self, training: Training) -> None:
        """Called in each attempt before its first step, after the state is restored. Nothing can be logged here."""

    def before_step(self, training: Training) -> None:
        """Called before each step; `training.position.step` is the number of completed ones."""

    def after_backward(self, training: Training) -> None:
        """Called before each update of the weights, when their gradients are complete and reduced over the ranks.

        With several losses, it is called for each of them, and only its own weights have gradients. Gradients aren't
        clipped yet, and are multiplied by `training.loss_scale`.
        """

    def after_step(self, training: Training) -> None:
        """Called after each step; `training.position.step` counts it already. Gradients are cleared by then."""

    def after_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:
        """Called after each complete evaluation, before the save that an evaluation may cause.

        Args:
            training: the training.
            metrics: of the evaluation, by the names that `Task.evaluate` and `Task.derive` return; the same on every
                rank.
        """

    def after_save(self, training: Training) -> None:
        """Called when a checkpoint has been copied; it may still be written in the background.

        State that this hook changes is in the next checkpoint, not in this one. Nothing can be logged here: times of
        saves depend on the clock, so an interrupted run saves at other steps.
        """

    def on_stop(self, training: Training) -> None:
        """Called when an attempt stops before the end of its run, after its save.

        SLURM may kill the job during the call. Nothing can be logged here.
        """

    def on_end(self, training: Training) -> None:
        """Called when the run is complete and its last checkpoint is on the disk.

        It is called again if the attempt is killed during the call, and each time the run is trained further and ends.
        Nothing can be logged here; log in `after_evaluation`, which also follows the last step. An error here makes the
        run `failed`, but loses nothing: a resume trains no further step, and calls this hook again.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors, numbers, strings, dicts, lists and tuples.

        Every rank calls it once at its start, before a state is restored, to check that the state can be saved. After
        that, only rank zero calls it, at each save.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`, whose tensors are on the CPU. Not called if it was empty."""
