"""The Hugging Face Trainer: report to hpctrain, save when the run has to stop, and continue from the newest save."""

from __future__ import annotations

from numbers import Real
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hpctrain import session

TIMINGS = ("_runtime", "_per_second")


def resume_path() -> str | None:
    """The newest reported save, for `Trainer.train(resume_from_checkpoint=...)`; None in the first attempt."""
    save = session.last_save()
    return None if save is None else str(save.path)


class SessionCallback(TrainerCallback):
    """Reports steps, logged metrics and saves; at a stop, has the Trainer save, and leaves the program.

    The program ends inside of `train`, by SystemExit with code 0, so that nothing after `train` runs before the
    training is complete. Create it before `train`: from then on a stop signal no longer ends the process.

    Args:
        done: whether the end of `train` completes the run. If the program does more, pass False, and call
            `session.done()` at its end.
    """

    def __init__(self, *, done: bool = True) -> None:
        session.start()
        self._done = done
        self._stopping = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the number of steps."""
        session.start(total_steps=state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report a step, and have the Trainer save and stop if the run has to; collective."""
        session.step(state.global_step)
        if session.should_stop():
            self._stopping = True
            control.should_save = True
            control.should_training_stop = True
            # an evaluation comes before the save, and may take longer than the time that is left
            control.should_evaluate = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """After a stop, this isn't the end of an epoch."""
        if self._stopping:
            control.should_save = False
            control.should_evaluate = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report the logged numbers, except for timings and the summary at the end."""
        logs = logs or {}
        if "train_runtime" in logs:
            return  # its train_loss is this attempt's sum divided by the steps of all attempts (transformers 5.23)
        numbers = {
            name: value for name, value in logs.items() if isinstance(value, Real) and not name.endswith(TIMINGS)
        }
        if numbers and state.is_world_process_zero:
            session.step(state.global_step, numbers)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report a save."""
        session.saved(state.global_step, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the end, or leave after a stop."""
        if self._stopping:
            raise SystemExit(0)
        if self._done:
            session.done()
