"""What a sender needs of a service, and the services that there are."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.run.directory import RunDirectory
from hpctrain.sync.description import Description, ReportedState
from hpctrain.sync.rows import Row

SERVICES = ("wandb", "mlflow")
"""Their names: keys of the group `logger`, extras of the package, and what `sync --service` takes."""
SHOWN_AS = {"wandb": "W&B", "mlflow": "MLflow"}
_CLASSES = {
    "wandb": ("hpctrain.sync.wandb_online", "WandbOnline"),
    "wandb_offline": ("hpctrain.sync.wandb_offline", "WandbOffline"),
    "mlflow": ("hpctrain.sync.mlflow_server", "MLflowServer"),
}


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

    Attributes:
        confirms_at_close: whether only `close` waits until the service has what it was sent.
    """

    confirms_at_close: bool

    def destination(self, run: Description) -> str:
        """Return where `open` finds or makes the run, such as a server and a project; without any password.

        Raises:
            ServiceSetupError: no server is known.
        """
        ...

    def open(self, run: Description, known_id: str) -> OpenedRun:
        """Find the run at the service, or make it.

        Args:
            run: the run.
            known_id: the service's id of it at this destination, where the run may have been deleted; empty if no
                sender knows one.

        Raises:
            ServiceError: the service can't be reached, or refuses.
            ServiceSetupError: no server is known.
        """
        ...

    def send(self, rows: Sequence[Row], *, in_doubt: bool) -> None:
        """Send rows, with increasing steps.

        Args:
            rows: none of which were confirmed.
            in_doubt: whether some of them may have arrived: those must not be doubled.

        Raises:
            ServiceError: the service can't be reached, or refuses.
        """
        ...

    def close(self, reported: ReportedState) -> None:
        """Report the run's state, and return when the service has everything.

        Raises:
            ServiceError: the service can't be reached, or refuses, or didn't take everything in time.
        """
        ...

    def abandon(self) -> None:
        """Leave at once, without waiting for the service."""
        ...


def without_user(text: str) -> str:
    """Remove user names and passwords from the addresses in a text."""
    return re.sub(r"://[^/?#\s]*@", "://", text)


def make_service(name: str, directory: RunDirectory, *, offline: bool = False, server: str | None = None) -> Service:
    """Make the client of a service.

    Args:
        name: one of `SERVICES`.
        directory: of the run.
        offline: write the service's offline files; for W&B alone.
        server: its address, in place of the one that the run names; for MLflow alone.

    Raises:
        ServiceSetupError: its package isn't installed.
    """
    if importlib.util.find_spec(name) is None:
        raise ServiceSetupError(f'{SHOWN_AS[name]} needs the package {name}: pip install "hpctrain[{name}]"')
    module, class_name = _CLASSES[f"{name}_offline" if offline else name]
    arguments: list[object] = [directory] if offline else [server] if name == "mlflow" else []
    made: Service = getattr(importlib.import_module(module), class_name)(*arguments)
    return made
