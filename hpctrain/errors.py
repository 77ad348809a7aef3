"""The exceptions of hpctrain, and the exit codes of its commands.

HpctrainError
├── ConfigError                  a key, its value, what is wrong, what to do; exit code 2
├── ClusterEnvironmentError      environment variables that are missing or contradict each other; exit code 2
├── RunDirectoryError            a run directory that is missing, taken, or not a run directory; exit code 2
│   └── RunDirectoryUnavailableError  the file system failed to create or claim it; exit code 2
├── SupersededError              a later attempt owns the run: this one stops without writing
├── SchedulerError               SLURM refused a request, or gave an answer that can't be parsed
│   └── SchedulerMissingError    SLURM's command isn't on this machine, or its daemon doesn't answer
├── RendezvousError              the ranks didn't meet in time
├── DeviceError                  a GPU that the run needs is missing or broken, or two ranks have the same one
├── CheckpointError              a checkpoint can't be written or read
│   ├── CheckpointDamagedError   a checkpoint that is incomplete, or whose checksums don't match
│   └── CheckpointUnlikeError    a node reads different bytes of a checkpoint than rank zero
├── TaskError                    a task, model or data set broke its contract with the training loop
├── DivergedError                the loss is NaN or infinite, or the loss scale has collapsed
└── RunFailedError               a run that a command or a program waited for didn't complete

Every message is written for the user: what was expected, what was found, and what to do.

Exit code 2 means that nothing was done. Any error that ends an attempt ends it as failed, with exit code 1; a mistake
in the configuration that only the ranks could find is no exception.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

ERROR_PREFIX = "hpctrain: error: "
"""Beginning of a line with which a command of hpctrain reports that it failed."""


class ExitCode(IntEnum):
    """The exit code of a command, a rank or a batch script."""

    FINISHED = 0
    FAILED = 1
    BAD_CONFIGURATION = 2
    CANCELLED = 3
    INTERRUPTED = 4


MAX_SHOWN_CHARS = 500
"""Characters of a value that an error repeats."""


def error_text(error: BaseException) -> str:
    """The text of any error, also of one whose `__str__` raises another."""
    try:
        return str(error)
    except Exception as other:
        return f"(its __str__ raises {type(other).__name__})"


class HpctrainError(Exception):
    """Base of every error that hpctrain raises on purpose.

    Args:
        message: what was expected, what was found, and what to do.
        elsewhere: whether another rank failed; its own error has the details.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    """Exit code of a command that this error ends before a run begins."""
    elsewhere = False  # also of a subclass that doesn't call this constructor

    def __init__(self, *message: str, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere
        super().__init__(*message)


class ConfigError(HpctrainError):
    """A configuration that can't work.

    Args:
        key: full name of the key, as typed on the command line.
        value: the value that was found there.
        problem: what is wrong with it.
        remedy: what to type or change instead.
    """

    exit_code = ExitCode.BAD_CONFIGURATION

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        self.key = key
        self.value = value
        self.problem = problem
        self.remedy = remedy
        text = "null" if value is None else str(value)
        assignment = f"{key}={text if len(text) <= MAX_SHOWN_CHARS else f'{text[:MAX_SHOWN_CHARS]}...'}"
        super().__init__(" ".join(f"{assignment}: {problem}; {remedy}".split()))


class ClusterEnvironmentError(HpctrainError):
    """Environment variables that don't determine one consistent place among the ranks.

    Args:
        message: what was expected, and what to do.
        variables: the variables that were found, with their values.
    """

    exit_code = ExitCode.BAD_CONFIGURATION

    def __init__(self, message: str, variables: dict[str, str]) -> None:
        self.variables = variables
        assignments = ", ".join(f"{name}={value}" for name, value in variables.items())
        super().__init__(f"{message} (found {assignments})" if assignments else message)


class RunDirectoryError(HpctrainError):
    """A run directory that is missing, already taken, or not a run directory."""

    exit_code = ExitCode.BAD_CONFIGURATION


class RunDirectoryUnavailableError(RunDirectoryError):
    """The file system failed to create a run directory, or to claim it for an attempt; it may succeed later."""


class SupersededError(HpctrainError):
    """A later attempt owns the run directory: this one stops without writing anything more."""


class SchedulerError(HpctrainError):
    """SLURM refused a request, or gave an answer that can't be parsed."""


class SchedulerMissingError(SchedulerError):
    """SLURM's command isn't on this machine, or its controller or database doesn't answer."""


class RendezvousError(HpctrainError):
    """The ranks of an attempt didn't meet in time.

    Args:
        message: where this rank looked, and what to do.
        waited: whether this rank waited for another rank that never came.
    """

    def __init__(self, message: str, *, waited: bool = False) -> None:
        self.waited = waited
        super().__init__(message)


class DeviceError(HpctrainError):
    """The devices of the ranks aren't what the run needs.

    Args:
        message: what was expected, what was found, and what to do.
        machine_at_fault: whether a machine is at fault, so another node may work; otherwise the configuration is.
        elsewhere: whether the devices of another rank are at fault.
    """

    def __init__(self, message: str, *, machine_at_fault: bool = True, elsewhere: bool = False) -> None:
        self.machine_at_fault = machine_at_fault
        super().__init__(message, elsewhere=elsewhere)


class CheckpointError(HpctrainError):
    """A checkpoint can't be written or read."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint that is incomplete, or whose checksums don't match."""


class CheckpointUnlikeError(CheckpointError):
    """A node reads different bytes of a checkpoint than rank zero, which found it intact."""


class TaskError(HpctrainError):
    """A task, model or data set broke its contract with the training loop."""


class DivergedError(HpctrainError):
    """The loss or the weights are NaN or infinite, or the loss scale has collapsed: more steps would be wasted."""


class RunFailedError(HpctrainError):
    """A run that a command or a program waited for didn't complete; the message carries the failed rank's error."""
