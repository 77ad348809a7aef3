"""A server of MLflow."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hpctrain.config.logger import FILE_STORE_REMEDY, FILE_STORE_VARIABLE
from hpctrain.files import describe_os_error
from hpctrain.run.directory import RunDirectory
from hpctrain.sync.sent_run import Description, ReportedState, Row
from hpctrain.sync.service import (
    NOTHING,
    OpenedRun,
    Service,
    ServiceSetupError,
    UntrustedServerError,
    client_errors,
    one_line,
    without_user,
)

MAX_METRICS = 1000
"""The server's bound on the metrics of a request."""
MAX_PARAMS = 100
MAX_VALUE_CHARS = 500
"""Characters of a parameter that every version of the server takes."""
MAX_TAG_CHARS = 5000
MAX_KEY_CHARS = 250
HASH_CHARS = 8
REFUSED = "INVALID_PARAMETER_VALUE"
"""MLflow's error code for a metric that it will never take."""
MISSING = "RESOURCE_DOES_NOT_EXIST"
"""MLflow's error code for a run that the server doesn't know."""
DIGEST_TAG = "hpctrain.digest"
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables of MLflow's client, which otherwise waits for many minutes; those that are set stay."""
STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


def connect(directory: RunDirectory, *, offline: bool, server: str | None) -> Service:  # noqa: ARG001 - for W&B alone
    """Make the client of a run; see `service.make_service`."""
    return MLflowServer(server)


class MLflowServer:
    """A run at a server of MLflow.

    Args:
        server: its address, in place of the one that the run names.
    """

    confirms_at_close = False

    def __init__(self, server: str | None = None) -> None:
        self._server = server
        self._client: Any = None
        self._run_id = ""
        self._found_again = False
        self._left_out: set[str] = set()

    def destination(self, run: Description) -> str:
        """Name the server and the experiment; see `Service`."""
        return f"{without_user(self._address(run)).rstrip('/')}, experiment {_experiment_name(run)}"

    def open(self, run: Description, known_id: str) -> OpenedRun:
        """Find the run by its id or its digest, or make it; see `Service`."""
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        with client_errors():
            from mlflow import MlflowClient

            address = self._address(run)
            try:
                self._client = MlflowClient(tracking_uri=address)
                experiment = self._experiment(_experiment_name(run))
            except Exception as error:
                if FILE_STORE_VARIABLE not in str(error):
                    raise
                raise ServiceSetupError(
                    f"MLflow refuses the folder {without_user(address)}: {FILE_STORE_REMEDY}"
                ) from error
            is_known = bool(known_id) and self._is_active(known_id)
            self._run_id = known_id if is_known else self._search(experiment, run.digest)
            self._found_again = bool(self._run_id) and not is_known
            if not self._run_id:
                tags = {DIGEST_TAG: run.digest, **(run.key("mlflow", "tags") or {})}
                started = round(1000 * (run.started or time.time()))
                created = self._client.create_run(experiment, start_time=started, tags=tags, run_name=run.name)
                self._run_id = created.info.run_id
            self._describe(run)
        return OpenedRun(
            run_id=self._run_id,
            address=f"{without_user(address).rstrip('/')}/#/experiments/{experiment}/runs/{self._run_id}",
            last_step=None if is_known else NOTHING,
        )

    def send(self, rows: Sequence[Row], *, in_doubt: bool) -> None:
        """Send metrics in requests of up to a thousand, and media as artifacts; see `Service`."""
        with client_errors():
            from mlflow.entities import Metric

            metrics = [
                Metric(_key(name), value, round(1000 * (row.time or time.time())), row.step)
                for row in rows
                for name, value in row.values.items()
            ]
            if in_doubt or self._found_again:
                logged = self._logged_points({metric.key for metric in metrics})
                metrics = [metric for metric in metrics if (metric.key, metric.step) not in logged]
            for first in range(0, len(metrics), MAX_METRICS):
                self._log(metrics[first : first + MAX_METRICS])
            for row in rows:
                self._send_media(row)

    def close(self, reported: ReportedState) -> None:
        """Report the run's state; see `Service`."""
        with client_errors():
            for name, value in reported.summary.items():
                self._client.set_tag(self._run_id, _key(name), str(value)[:MAX_TAG_CHARS])
            if reported.final:
                self._client.set_terminated(self._run_id, STATUS[reported.state])

    def abandon(self) -> None:
        """Do nothing: each request is complete, or not made."""

    def _address(self, run: Description) -> str:
        config_address = run.key("mlflow", "tracking_uri")
        user_address = self._server or os.environ.get("MLFLOW_TRACKING_URI")
        if self._server is None and config_address and config_address != user_address and not run.is_private:
            server = without_user(str(config_address))
            raise UntrustedServerError(
                f"other users could have written the config.yaml of {run.name}, which names the server {server}; "
                f"your credentials would be sent there. If you trust that server, add --server {shlex.quote(server)}"
            )
        address = user_address if self._server is not None else config_address or user_address
        if not address:
            raise ServiceSetupError("no server is known: set logger.mlflow.tracking_uri, or export MLFLOW_TRACKING_URI")
        return str(address)

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                # another run of the sweep may have made it meanwhile
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _search(self, experiment: str, digest: str) -> str:
        runs = self._client.search_runs([experiment], f"tags.`{DIGEST_TAG}` = '{digest}'", max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _describe(self, run: Description) -> None:
        from mlflow.entities import Param, RunTag

        there = self._client.get_run(self._run_id)
        texts = {_key(key): _text(value) for key, value in run.config.items()}
        # a parameter can't be changed, and a resume may have changed the configuration: config.yaml has the last one
        new = [Param(key, value) for key, value in texts.items() if key not in there.data.params]
        for first in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[first : first + MAX_PARAMS])
        tags = {f"hpctrain.{name}": value for name, value in run.origin.items()}
        if run.group:
            tags["hpctrain.sweep"] = run.group
        if "git_commit" in run.origin:
            tags["mlflow.source.git.commit"] = run.origin["git_commit"]
        self._client.log_batch(self._run_id, tags=[RunTag(name, value[:MAX_TAG_CHARS]) for name, value in tags.items()])
        self._client.update_run(self._run_id, status="RUNNING")

    def _log(self, metrics: Sequence[Any]) -> None:
        """Send metrics; one that MLflow refuses is left out, so that it doesn't hold up all others."""
        accepted = [metric for metric in metrics if metric.key not in self._left_out]
        if not accepted:
            return
        try:
            self._client.log_batch(self._run_id, metrics=accepted)
        except Exception as error:
            # a deleted run has the same error code: then no metric is to blame
            if getattr(error, "error_code", "") != REFUSED or not self._is_active(self._run_id):
                raise
            names = sorted({metric.key for metric in accepted})
            if len(names) == 1:
                self._left_out.add(names[0])
                print(f"MLflow: {names[0]} is left out: {one_line(error)}", flush=True)
                return
            half = set(names[: len(names) // 2])
            self._log([metric for metric in accepted if metric.key in half])
            self._log([metric for metric in accepted if metric.key not in half])

    def _is_active(self, run_id: str) -> bool:
        """Return whether the server has a run, which wasn't deleted."""
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except Exception as error:
            if getattr(error, "error_code", "") != MISSING:
                raise
            return False

    def _logged_points(self, keys: set[str]) -> set[tuple[str, int]]:
        return {
            (key, metric.step) for key in sorted(keys) for metric in self._client.get_metric_history(self._run_id, key)
        }

    def _send_media(self, row: Row) -> None:
        for medium in row.media.values():
            with ExitStack() as stack:
                try:
                    path = stack.enter_context(medium.copied())
                except FileNotFoundError:  # a resume has removed it
                    continue
                except OSError as error:
                    print(f"{medium.name} of step {row.step} is left out: {describe_os_error(error)}", flush=True)
                    continue
                # the same file again replaces it
                folder = medium.file.rpartition("/")[0]
                self._client.log_artifact(self._run_id, str(path), artifact_path=folder)


def _experiment_name(run: Description) -> str:
    return run.key("mlflow", "experiment") or "hpctrain"


def _key(name: str) -> str:
    """A name as MLflow takes it: a relative path of plain characters. Names that differ get keys that differ."""
    parts = re.sub(r"[^\w.\- /]", "_", name).split("/")
    key = "/".join(part for part in parts if part not in ("", ".", ".."))
    if key == name and 0 < len(key) <= MAX_KEY_CHARS:
        return key
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:HASH_CHARS]
    return f"{key[: MAX_KEY_CHARS - HASH_CHARS - 1]}_{digest}"


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
