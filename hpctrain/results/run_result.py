"""What one run achieved, read from its directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.config.identity import flat_values, stored_texts
from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.run.config_change import changed_values, trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import as_typed
from hpctrain.status.report import read_statuses
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run.

    Attributes:
        status: its status.
        config: the values with which it trained, by their full keys. Those that a resume changed are one text, such as
            ``0.001 until step 10, then 0.003``. Empty if they can't be read.
        changed_keys: the keys whose values a resume changed between two steps.
    """

    status: RunStatus
    config: Mapping[str, Any]
    changed_keys: Collection[str] = ()

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory.at(self.status.path)

    @property
    def is_live(self) -> bool:
        """Whether it trains, or waits in the queue, so that its result may still change."""
        return self.status.state.may_change

    @property
    def counts(self) -> bool:
        """Whether the run competes with others: it has completed, or is live. Others are listed after these."""
        return self.is_live or self.status.state is RunState.COMPLETED

    @property
    def training_s(self) -> float:
        """Seconds of training, without steps that were lost and repeated."""
        return self.status.account.spent.training_s

    @property
    def is_program(self) -> bool:
        """Whether it is the run of a program."""
        return bool(self.status.command)


def read_results(directories: Sequence[RunDirectory]) -> list[RunResult]:
    """Read the results of runs, in the order of their paths; numbers in names count as numbers."""
    ordered = sorted(directories, key=_place)
    statuses = read_statuses(ordered)
    return [_result(directory, status) for directory, status in zip(ordered, statuses, strict=True)]


def _result(directory: RunDirectory, status: RunStatus) -> RunResult:
    plain = read_plain_config(trained_config(directory))
    values = flat_values(plain)
    values |= {key: as_typed(values[key], text) for key, text in stored_texts(plain).items() if key in values}
    changed = changed_values(directory) if values else {}
    # an empty group is none
    return RunResult(status, {key: value for key, value in values.items() if value != {}} | changed, tuple(changed))


def _place(directory: RunDirectory) -> tuple[str, int, str]:
    name = directory.path.name
    return str(directory.path.parent), int(name) if name.isdecimal() else -1, name
