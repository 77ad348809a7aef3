"""The exceptions of hpctrain, and the exit codes of its commands.

HpctrainError
├── ConfigError                 a key, its value and a remedy; exit code 2
├── ClusterEnvironmentError     contradictory or missing environment variables; exit code 2
├── RunDirectoryError           a run directory that is missing, taken, or not one of ours; exit code 2
├── SupersededError             a later attempt owns the run; this one must stop without writing
├── SchedulerError              SLURM refused, or answered what can't be read
│   └── SchedulerMissingError   the command isn't on this machine, or no controller answers
├── RendezvousError             the ranks did not find each other
├── CheckpointError             a checkpoint can't be written or read
│   ├── CheckpointDamagedError  a checkpoint whose bytes are not the ones that were written
│   └── CheckpointUnlikeError   one node reads other bytes of it than rank zero
├── TaskError                   what is trained broke the contract with the loop
├── DivergedError               the loss is no number any more, or the loss scale has collapsed
├── RunFailedError              the run ended in failure; carries what the failing rank left
├── RunCancelledError           exit code 3
└── RunInterruptedError         stopped, resumable; exit code 4
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What a command, a rank and a batch script end with."""

    FINISHED = 0
    FAILED = 1
    BAD_CONFIGURATION = 2
    CANCELLED = 3
    INTERRUPTED = 4


class HpctrainError(Exception):
    """Base of every error that hpctrain raises on purpose; its text is written for the user."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class ConfigError(HpctrainError):
    """A configuration that can't work.

    Args:
        key: full name of the key, as typed on the command line.
        value: what was found there.
        problem: what is wrong with it.
        remedy: what to type or change instead.
    """

    exit_code = ExitCode.BAD_CONFIGURATION

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        shown = f"{key}={'null' if value is None else value}"
        super().__init__(" ".join(f"{shown}: {problem}; {remedy}".split()))


class ClusterEnvironmentError(HpctrainError):
    """Environment variables from which no consistent place in the world follows.

    Args:
        message: what was expected, found, and what to do.
        variables: the variables concerned, with their values.
    """

    exit_code = ExitCode.BAD_CONFIGURATION

    def __init__(self, message: str, variables: dict[str, str]) -> None:
        self.variables = variables
        found = ", ".join(f"{name}={value}" for name, value in variables.items())
        super().__init__(f"{message} (found {found})" if found else message)


class RunDirectoryError(HpctrainError):
    """A run directory that is missing, already taken, or not one of ours."""

    exit_code = ExitCode.BAD_CONFIGURATION


class SupersededError(HpctrainError):
    """A later attempt owns the run directory: this one stops without writing anything more."""


class SchedulerError(HpctrainError):
    """SLURM refused a request, or answered something that can't be read."""


class SchedulerMissingError(SchedulerError):
    """SLURM's command isn't on this machine, or no controller or database answers it."""


class RendezvousError(HpctrainError):
    """The ranks of an attempt did not find each other in time.

    Args:
        message: where they looked, and what to do.
        waited: for another rank, in vain.
    """

    def __init__(self, message: str, *, waited: bool = False) -> None:
        self.waited = waited
        super().__init__(message)


class CheckpointError(HpctrainError):
    """A checkpoint can't be written or read.

    Args:
        message: which one, what was found, and what to do.
        elsewhere: it happened to another rank, which says more.
    """

    def __init__(self, message: str, *, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere
        super().__init__(message)


class CheckpointDamagedError(CheckpointError):
    """A checkpoint that is incomplete or whose checksums don't match."""


class CheckpointUnlikeError(CheckpointError):
    """One node reads other bytes of a checkpoint than rank zero, which found it intact."""


class TaskError(HpctrainError):
    """What is trained broke the contract between a task and the loop."""


class DivergedError(HpctrainError):
    """The loss is NaN or infinite, or the loss scale has collapsed: more steps would be wasted."""


class RunFailedError(HpctrainError):
    """The run ended in failure; the text carries host, rank and traceback of what failed."""


class RunCancelledError(HpctrainError):
    """The run was cancelled by its user."""

    exit_code = ExitCode.CANCELLED


class RunInterruptedError(HpctrainError):
    """The run was stopped and can be resumed."""

    exit_code = ExitCode.INTERRUPTED
