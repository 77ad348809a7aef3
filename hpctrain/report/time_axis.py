"""The time axis of a run's charts: since its beginning, in a unit that fits, with its attempts."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.phrases import local_time
from hpctrain.report.frame import Band
from hpctrain.report.run_record import RunRecord

_UNITS = (
    (2 * 86400.0, 86400.0, "days"),
    (2 * 3600.0, 3600.0, "hours"),
    (120.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Time since the beginning of a run.

    Attributes:
        origin: epoch seconds of the beginning.
        size: of a unit, in seconds.
        label: below the axis.
        bands: when each attempt was at work.
    """

    origin: float
    size: float
    label: str
    bands: list[Band]

    @classmethod
    def of(cls, record: RunRecord, last: float) -> TimeAxis:
        """The axis on which everything fits up to a time, in epoch seconds, and up to the last attempt's end."""
        whole = max([last, *(span.end for span in record.spans)]) - record.origin
        size, unit = next((size, unit) for least, size, unit in _UNITS if whole >= least)
        bands = [
            Band(
                (span.begin + span.account.spent.queued_s - record.origin) / size,
                (span.end - record.origin) / size,
                f"attempt {span.attempt.attempt}",
            )
            for span in record.spans
        ]
        return cls(record.origin, size, f"{unit} since {local_time(record.origin)}", bands)

    def place(self, when: float) -> float:
        """Where a time is on the axis; ``when`` is in epoch seconds."""
        return max(0.0, when - self.origin) / self.size
