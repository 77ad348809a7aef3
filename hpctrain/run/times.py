"""The times of an attempt by kind of work, recorded in its claim while it runs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.record_fields import COUNT, NUMBER, TIME, field_types, finite_numbers

FILE_NAME = "times.json"
RECORD_EVERY_S = 10.0

log = logging.getLogger("hpctrain.run")


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Rank zero's wall time by kind of work, in seconds; None if the work wasn't done, or the time isn't known.

    Every field belongs to a phase (`attempt.hang.Phase`), and counts in `status.accounting`; other facts are fields of
    `TimesRecord`.
    """

    import_s: Annotated[float | None, NUMBER] = None
    """From the start of the process."""
    rendezvous_s: Annotated[float | None, NUMBER] = None
    build_s: Annotated[float | None, NUMBER] = None
    load_s: Annotated[float | None, NUMBER] = None
    first_step_s: Annotated[float | None, NUMBER] = None
    """To the end of the first new step."""
    train_s: Annotated[float | None, NUMBER] = None
    eval_s: Annotated[float | None, NUMBER] = None
    """All evaluations, also before the first new step."""
    save_s: Annotated[float | None, NUMBER] = None

    @property
    def starting_s(self) -> float:
        """Seconds from the start of the process to the end of the first new step, without evaluations."""
        return sum(max(0.0, getattr(self, name) or 0.0) for name in STARTING)


SPENT = tuple(PhaseTimes.__annotations__)
STARTING = ("import_s", "rendezvous_s", "build_s", "load_s", "first_step_s")
"""From the process's start to the end of the first new step, in this order; without evaluations."""


@dataclass(frozen=True, kw_only=True)
class TimesRecord(PhaseTimes):
    """An attempt's times and progress, as recorded in its claim, and in its end record."""

    last_step: Annotated[int | None, COUNT] = None
    """The last step that is known to be completed."""
    seen: Annotated[float | None, TIME] = None
    """Time of the record, in epoch seconds."""
    total_steps: Annotated[int | None, COUNT] = None
    """The last step of the run."""
    resumed_step: Annotated[int | None, COUNT] = None
    """For a program: the step before the first one that it reported."""

    @classmethod
    def read(cls, claim: Path) -> TimesRecord:
        """Read the record in a claim; without one, all fields are None."""
        record: dict[str, Any] = read_times(claim)
        return cls(**{name: record[name] for name in field_types(TimesRecord) if name in record})


class Times:
    """A stopwatch that counts every second for one kind of work in `SPENT`; they add up to the attempt's wall time.

    It costs nothing per step: the loop switches it only for work other than steps.

    Args:
        age_s: seconds since the process started; they count as `import_s`.
        clock: monotonic seconds.
        now: epoch seconds.
    """

    def __init__(
        self, age_s: float, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._now = now
        self._since = clock() - age_s
        self.launched = now() - age_s
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._doing = STARTING[0]
        self._facts: dict[str, int] = {}
        self._file: Path | None = None
        self._recorded_at = float("-inf")

    @property
    def doing(self) -> str:
        """The current kind of work, one of `SPENT`."""
        return self._doing

    def enter(self, doing: str) -> None:
        """Count the time from now on for ``doing``, one of `SPENT`."""
        now = self._clock()
        self._spent[self._doing] += now - self._since
        self._since = now
        self._doing = doing

    def recount(self, previous: str, doing: str) -> None:
        """Move the time that was counted for one kind of work to another.

        Args:
            previous: the kind of work that gets 0 s.
            doing: the kind that gets the time.
        """
        self.enter(self._doing)
        self._spent[doing] += self._spent[previous]
        self._spent[previous] = 0.0

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Context manager in which the time counts for ``doing``."""
        before = self._doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)

    def spent(self) -> dict[str, float]:
        """Seconds so far, of each kind of work that was done."""
        self.enter(self._doing)
        return {name: round(seconds, 3) for name, seconds in self._spent.items() if seconds}

    def training_s(self) -> float:
        """Seconds in steps and between them so far, the first new step included."""
        self.enter(self._doing)
        return self._spent["first_step_s"] + self._spent["train_s"]

    def record_in(self, claim: Path) -> None:
        """Record into the attempt's claim from now on; only for rank zero."""
        self._file = claim / FILE_NAME

    @property
    def claim(self) -> Path | None:
        """The attempt's claim, on rank zero; None elsewhere."""
        return None if self._file is None else self._file.parent

    def first_step_done(self, step: int) -> None:
        """Count the time from now on as training: the first new step is done."""
        self.enter("train_s")
        log.info("the first step came %s", describe_start(self._spent))
        self.record(step, force=True)

    def add_facts(self, **facts: int | None) -> None:
        """Add fields to the record, `total_steps` or `resumed_step` of `TimesRecord`; None adds nothing."""
        self._facts |= {name: value for name, value in facts.items() if value is not None}

    def record(self, step: int, *, force: bool = False) -> None:
        """Record the attempt's progress, at most every `RECORD_EVERY_S`: a killed attempt leaves no other record.

        Args:
            step: completed steps.
            force: record it even if the last record is recent.
        """
        if self._file is None or not (force or self._clock() - self._recorded_at >= RECORD_EVERY_S):
            return
        fields = {**self.spent(), **self._facts, "last_step": step, "seen": self._now()}
        # training doesn't depend on the record
        with contextlib.suppress(OSError):
            # not durable: an fsync may take seconds on a busy file system, and the next record comes soon
            write_json(self._file, fields, durable=False)
        self._recorded_at = self._clock()


def describe_start(spent: Mapping[str, float]) -> str:
    """The time before the first new step: ``2.3 s after the start: import 1.4, ..., first step 0.1``.

    Args:
        spent: seconds by kind of work, when that step is done; an evaluation may have come before it.
    """
    *before, first_step = STARTING
    names = (*before, "eval_s", first_step)
    parts = {name.removesuffix("_s").replace("_", " "): spent.get(name, 0.0) for name in names}
    parts_text = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    return f"{sum(parts.values()):.1f} s after the start: {parts_text}"


def read_times(claim: Path) -> dict[str, float]:
    """The fields of an attempt's `TimesRecord`, and numbers that only a later version knows; empty without a record."""
    numbers = finite_numbers(read_json_or_empty(claim / FILE_NAME))
    types = field_types(TimesRecord)
    return {name: value for name, value in numbers.items() if types.get(name, NUMBER).accepts(value)}
