"""The interface of a service to which a sender sends; `hpctrain.config.logger` lists the services."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.config.logger import SERVICES
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.files import describe_os_error
from hpctrain.run.directory import RunDirectory
from hpctrain.sync.sent_run import Description, ReportedState, Row

NOTHING = -1
"""The step before the first one."""


class ServiceError(HpctrainError):
    """A service can't be reached, or refuses; sending again may succeed."""


class ServiceSetupError(HpctrainError):
    """A service can't be used from here until its user installs or sets something."""


class UntrustedServerError(ServiceSetupError):
    """Only a file that other users could have written names the server, which would get this user's credentials."""

    exit_code = ExitCode.BAD_CONFIGURATION


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run, as a service has found or made it.

    Attributes:
        run_id: the service's id of the run.
        address: of the run's page; empty if it has none.
        last_step: the last step of which the service has a row; `NOTHING` if it has no rows; None if the service has
            the known run, but doesn't report its last step.
    """

    run_id: str
    address: str
    last_step: int | None


class Service(Protocol):
    """A run at a service, in one process. No method is called again after one of them has raised an error.

    `open`, `send` and `close` raise a ServiceError if the service can't be reached, or refuses; `destination` and
    `open` raise a ServiceSetupError if no server is known, or the client never takes the one that is.

    Attributes:
        confirms_at_close: whether only `close` waits until the service has what it was sent.
    """

    confirms_at_close: bool

    def destination(self, run: Description) -> str:
        """Return where `open` finds or makes the run, such as a server and a project; without any password."""

    def open(self, run: Description, known_id: str) -> OpenedRun:
        """Find the run at the service, or make it.

        Args:
            run: the run.
            known_id: the service's id of it at this destination, where the run may have been deleted; empty if no
                sender knows one.
        """

    def send(self, rows: Sequence[Row], *, in_doubt: bool) -> None:
        """Send rows, with increasing steps.

        Args:
            rows: none of which were confirmed.
            in_doubt: whether some of them may have arrived: those must not be doubled.
        """

    def close(self, reported: ReportedState) -> None:
        """Report the run's state, and return when the service has everything."""

    def abandon(self) -> None:
        """Leave at once, without waiting for the service."""


def make_service(name: str, directory: RunDirectory, *, offline: bool = False, server: str | None = None) -> Service:
    """Make the client of a service.

    Args:
        name: a key of `SERVICES`.
        directory: of the run.
        offline: write the service's offline files; for W&B alone.
        server: its address, in place of the one that the run names; for MLflow alone.

    Raises:
        ServiceSetupError: its package isn't installed.
    """
    if importlib.util.find_spec(name) is None:
        raise ServiceSetupError(f'{SERVICES[name].title} needs the package {name}: pip install "hpctrain[{name}]"')
    module = importlib.import_module(f"hpctrain.sync.{name}")
    service: Service = module.connect(directory, offline=offline, server=server)
    return service


@contextlib.contextmanager
def client_errors() -> Iterator[None]:
    """Turn whatever a client raises in the context into a ServiceError: clients don't document their many classes."""
    try:
        yield
    except ServiceSetupError:
        raise
    except Exception as error:
        raise ServiceError(one_line(error)) from error


def without_user(text: str) -> str:
    """Remove user names and passwords from the addresses in a text."""
    return re.sub(r"://[^/?#\s]*@", "://", text)


def one_line(error: BaseException) -> str:
    """An error of a client in one line, without what a terminal needs to colour it, and without passwords."""
    text = without_user(" ".join(str(error).split())) or type(error).__name__
    return "".join(char for char in text if char.isprintable())[:500]


def problem_text(error: BaseException) -> str:
    """An error in one line, as the cursor and the log have it."""
    return describe_os_error(error) if isinstance(error, OSError) else str(error) or type(error).__name__
