"""``conf/logger``: what is logged during training. Owner: hpctrain.train."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from hpctrain.config import require
from hpctrain.errors import ConfigError

LONGEST_WAIT_S = 10
"""SLURM ends rank zero 15 s after the other ranks have ended."""
FILE_STORE_VARIABLE = "MLFLOW_ALLOW_FILE_STORE"
"""The variable without which MLflow refuses folders, since version 3.13."""
FILE_STORE_REMEDY = (
    "name a server such as http://login1:5000 or, after pip install mlflow, a database such as "
    f"sqlite:////home/me/mlflow.db, or export {FILE_STORE_VARIABLE}=true"
)
TAGS = require.each(
    require.that(
        lambda tag: 1 <= len(tag) <= 64,
        "is not a tag of 1 to 64 characters",
        "write it shorter, or omit it",
        quoted=True,
    )
)
W_AND_B_NAME = require.that(
    lambda name: re.fullmatch(r"[^/\\#?%:]{1,128}", name),
    "is not a name that W&B allows",
    r"use up to 128 characters, and none of / \ # ? % :",
    quoted=True,
)


def _without_user(key: str, uri: str) -> None:
    try:
        address = urlsplit(uri)
        has_user = "@" in address.netloc
        if address.scheme in ("http", "https"):
            _ = address.port  # a password with a slash looks like a port
    except ValueError as error:
        masked_uri = "***" if "@" in uri else uri
        raise ConfigError(key, masked_uri, f"is not an address ({error})", "write it as http://login1:5000") from error
    if has_user:
        # the user name may be a token
        problem = "contains a user name or password, which would be in config.yaml"
        raise ConfigError(key, "***", problem, "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead")


def _named_tags(key: str, tags: Mapping[str, object]) -> None:
    for name, value in tags.items():
        if not isinstance(value, str):
            raise ConfigError(f"{key}.{name}", value, "is not a string", f"write {key}.{name}='\"{value}\"'")


@dataclass(kw_only=True, slots=True)
class Wandb(require.Checked):
    """Weights & Biases. Its API key comes from the environment or from ~/.netrc alone. Owner: hpctrain.sync."""

    prefix = "logger.wandb."
    title = "W&B"
    secrets = ("WANDB_API_KEY",)
    server = None

    enabled: bool = False
    """Send the run to W&B, during training and at its end, from a background process of rank zero."""
    mode: Annotated[str, require.one_of("online", "offline")] = "online"
    """`offline`: write W&B's offline files into the run directory instead, for nodes that don't reach W&B."""
    project: Annotated[str, W_AND_B_NAME] = "hpctrain"
    """The project at W&B."""
    entity: Annotated[str | None, W_AND_B_NAME] = None
    """The team or user at W&B; null: the user's default."""
    group: Annotated[str | None, require.single_line, require.not_empty] = None
    """The group at W&B; null: the name of the sweep's folder; without a sweep, none."""
    tags: Annotated[list[str], TAGS] = field(default_factory=list)
    """Tags of the run at W&B."""

    @property
    def is_offline(self) -> bool:
        """Whether nothing is sent."""
        return self.mode == "offline"


@dataclass(kw_only=True, slots=True)
class MLflow(require.Checked):
    """MLflow. Its password or token comes from the environment alone. Owner: hpctrain.sync."""

    prefix = "logger.mlflow."
    title = "MLflow"
    secrets = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    is_offline = False

    enabled: bool = False
    """Send the run to an MLflow server, during training and at its end, from a background process of rank zero."""
    tracking_uri: Annotated[str | None, require.single_line, require.not_empty, _without_user] = None
    """Address of the server, such as http://login1:5000, or of a database, such as sqlite:////home/me/mlflow.db; null:
    the environment variable MLFLOW_TRACKING_URI."""
    experiment: Annotated[str, require.single_line, require.not_empty] = "hpctrain"
    """The experiment at MLflow; created if it is missing."""
    tags: Annotated[dict[str, str], _named_tags] = field(default_factory=dict)
    """Tags of the run at MLflow, name to value."""

    @property
    def server(self) -> str | None:
        """The server, if the group names it."""
        return self.tracking_uri


SERVICES: Mapping[str, type[Wandb] | type[MLflow]] = {"wandb": Wandb, "mlflow": MLflow}
"""The services, by name: the key in the group `logger`, the extra of the package, the value of `sync --service`, the
module of hpctrain.sync that has `connect`, and the name by which Python imports the client. `title` is what messages
call a service, `secrets` are the variables that its client reads, and that no file of a run may contain, and `server`
is the one that the group names."""


@dataclass(kw_only=True, slots=True)
class Logger(require.Checked):
    """Logging; metrics.jsonl is always written."""

    every_steps: Annotated[int, require.at_least(1)] = 10
    """Steps between records of the training loss, which is the mean over these steps and all ranks."""
    tensorboard: bool = True
    """Also write TensorBoard's event files."""
    csv: bool = False
    """Also write metrics.csv, a table of metrics.jsonl."""
    measure: bool = True
    """Time a few steps part by part, to find what holds the run back, and log throughput, MFU and memory."""
    samples: bool = False
    """Also write the indices of each step's samples to logs/samples_RANK.jsonl, on every rank."""
    wandb: Wandb = field(default_factory=Wandb)
    """Weights & Biases."""
    mlflow: MLflow = field(default_factory=MLflow)
    """MLflow."""
    sync_timeout_s: Annotated[float, require.between(0, LONGEST_WAIT_S)] = LONGEST_WAIT_S
    """Most seconds that rank zero waits at the end of a completed run for W&B and MLflow to get everything."""

    @property
    def enabled_services(self) -> dict[str, Wandb | MLflow]:
        """The groups of the services that are enabled, by name."""
        return {name: group for name in SERVICES if (group := getattr(self, name)).enabled}
