"""What MLflow's client is asked for; the client itself, of which the gate has none, is replaced."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hpctrain.cli import main
from hpctrain.errors import ExitCode
from hpctrain.run.directory import RunDirectory
from hpctrain.sync.mlflow import MAX_KEY_CHARS, MLflowServer
from hpctrain.sync.sent_run import Row, Rows, describe
from hpctrain.sync.service import NOTHING, ServiceError, ServiceSetupError, UntrustedServerError
from tests.support.logged_run import LoggedRun

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
SECRET_ADDRESS = "https://bob:s3cret@host:5000/"


class RefusedError(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


class MissingError(Exception):
    error_code = "RESOURCE_DOES_NOT_EXIST"


class Client:
    """A server that refuses metrics whose name contains `bad`."""

    stage = "active"
    down = False

    def __init__(self, tracking_uri):
        self.address = tracking_uri
        self.keys = []
        self.made = []

    def get_experiment_by_name(self, name):
        if self.down:
            raise OSError(f"{self.address}api/{name} doesn't answer")
        return SimpleNamespace(experiment_id="7")

    def search_runs(self, *_, **__):
        return []

    def create_run(self, *_, **__):
        self.made.append("abc")
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def get_run(self, run_id):
        if run_id not in ("abc", "deleted"):
            raise MissingError(f"Run with id={run_id} not found")
        stage = "deleted" if run_id == "deleted" else self.stage
        return SimpleNamespace(data=SimpleNamespace(params={}), info=SimpleNamespace(lifecycle_stage=stage))

    def update_run(self, *_, **__):
        pass

    def log_artifact(self, _, path, *, artifact_path):
        self.keys.append(f"{artifact_path}: {Path(path).read_text()}")

    def log_batch(self, _, *, metrics=(), params=(), tags=()):
        del params, tags
        if self.stage != "active" or any("bad" in metric.key for metric in metrics):
            raise RefusedError("no")
        self.keys += [metric.key for metric in metrics]


@pytest.fixture
def client(monkeypatch):
    """The class of the client, from a package `mlflow` of this test."""
    package, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    package.__spec__ = ModuleSpec("mlflow", None)
    package.MlflowClient = type("Client", (Client,), {})
    for name in ("Metric", "Param", "RunTag"):
        fields = ("key", "value", "time", "step")
        setattr(entities, name, lambda *given, fields=fields: SimpleNamespace(**dict(zip(fields, given, strict=False))))
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr("hpctrain.sync.mlflow.VARIABLES", {})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SECRET_ADDRESS)
    return package.MlflowClient


@pytest.fixture
def opened(client, tmp_path):
    """An open server, and what was returned for it."""
    del client
    return open_server(tmp_path)


def open_server(tmp_path, known_id=""):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    directory.config.write_text(json.dumps({"name": "made"}))
    server = MLflowServer()
    return server, server.open(describe(directory, "digest"), known_id)


def sent_keys(server, *names):
    server.send([Row(1, 5.0, dict.fromkeys(names, 1.0))], in_doubt=False)
    return list(server._client.keys)


def test_the_password_of_the_address_is_for_the_client_alone(client, tmp_path):
    server, found = open_server(tmp_path)
    assert server._client.address == SECRET_ADDRESS
    assert (found.run_id, found.address) == ("abc", "https://host:5000/#/experiments/7/runs/abc")
    client.down = True
    with pytest.raises(ServiceError) as raised:
        open_server(tmp_path)
    assert str(raised.value) == "https://host:5000/api/hpctrain doesn't answer"


def test_without_a_server_its_user_has_to_name_one(client, tmp_path, monkeypatch):
    del client
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ServiceSetupError, match="no server is known"):
        open_server(tmp_path)


def test_a_folder_that_mlflow_refuses_ends_in_what_to_name_instead(client, tmp_path, monkeypatch):
    # as MLflow 3.17 words it
    text = "The filesystem tracking backend is in maintenance mode. [...] set `MLFLOW_ALLOW_FILE_STORE=true` to opt out"

    def refuse(self, tracking_uri):
        raise RefusedError(text)

    monkeypatch.setattr(client, "__init__", refuse)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:/store")
    with pytest.raises(ServiceSetupError, match=r"^MLflow refuses the folder file:/store: name a server .*=true$"):
        open_server(tmp_path)


@pytest.mark.parametrize("known_id", ["lost", "deleted"])
def test_a_run_that_the_server_does_not_have_any_more_is_made_anew(client, tmp_path, known_id):
    del client
    server, found = open_server(tmp_path, known_id)
    assert (server._client.made, found.run_id, found.last_step) == (["abc"], "abc", NOTHING)


def test_a_run_that_the_server_has_is_continued(client, tmp_path):
    del client
    server, found = open_server(tmp_path, "abc")
    assert (server._client.made, found.run_id, found.last_step) == ([], "abc", None)


def test_a_destination_is_the_server_and_the_experiment(client, directory):
    del client
    assert MLflowServer().destination(describe(directory, "digest")) == "https://host:5000, experiment hpctrain"


def test_plain_names_stay_and_others_get_keys_of_their_own(opened):
    long = "x" * MAX_KEY_CHARS
    names = [
        "eval/acc_1",
        "eval/acc@1",
        "eval/acc#1",
        f"{long}a",
        f"{long}b",
        "a//b",
        "a/b",
        "../x",
        "/x",
        "x",
        "..",
        "",
    ]
    keys = sent_keys(opened[0], *names)
    assert len(set(keys)) == len(names)
    assert [key for key in keys if key in names] == ["eval/acc_1", "a/b", "x"]
    for key in keys:
        assert 0 < len(key) <= MAX_KEY_CHARS
        assert not {"", ".", ".."} & set(key.split("/"))


def test_a_metric_that_is_refused_is_left_out_with_one_line(opened, capsys):
    server, _ = opened
    assert sorted(sent_keys(server, "a", "bad", "b", "c")) == ["a", "b", "c"]
    assert capsys.readouterr().out == "MLflow: bad is left out: no\n"
    assert sent_keys(server, "bad", "d")[3:] == ["d"]
    assert capsys.readouterr().out == ""


def test_a_run_that_was_deleted_leaves_nothing_out(opened):
    server, _ = opened
    server._client.stage = "deleted"
    with pytest.raises(ServiceError, match="no"):
        sent_keys(server, "a")


EVIL = "http://evil:5000"
REFUSAL = rf"could have written the config.yaml of .*, which names the server {EVIL}; .*, add --server {EVIL}"


@pytest.fixture
def named_server(directory, monkeypatch):
    """A run whose configuration names a server."""
    directory.config.write_text(json.dumps({"logger": {"mlflow": {"tracking_uri": EVIL}}}))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return directory


def destination(directory, server=None):
    return MLflowServer(server).destination(describe(directory, "digest")).partition(",")[0]


def test_a_server_that_only_its_user_can_have_named_is_used(named_server):
    assert destination(named_server) == EVIL


@pytest.mark.parametrize("opened", ["config", "path"])
@pytest.mark.parametrize("how", ["writable", pytest.param("foreign", marks=ROOT)])
def test_a_server_that_others_can_have_named_needs_the_users_word(named_server, monkeypatch, opened, how):
    path = getattr(named_server, opened)
    path.chmod(path.stat().st_mode | 0o020) if how == "writable" else os.chown(path, 65_534, -1)
    with pytest.raises(UntrustedServerError, match=REFUSAL):
        destination(named_server)
    assert destination(named_server, "http://mine:1") == "http://mine:1"
    assert destination(named_server, EVIL) == EVIL
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other:1")
    with pytest.raises(UntrustedServerError):
        destination(named_server)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", EVIL)
    assert destination(named_server) == EVIL


def test_the_command_refuses_such_a_server_before_it_writes_anything(named_server, client, capsys):
    del client
    named_server.path.chmod(0o2770)
    assert main(["sync", str(named_server.path), "--service", "mlflow"]) == ExitCode.BAD_CONFIGURATION
    assert re.search(REFUSAL, capsys.readouterr().err)
    assert not named_server.sync.exists()
    assert main(["sync", str(named_server.path), "--server", "http://me:secret@x"]) == ExitCode.BAD_CONFIGURATION
    assert "contains a user name or password" in capsys.readouterr().err


def test_media_are_sent_from_the_runs_own_files_alone(directory, client, capsys, tmp_path):
    del client
    run = LoggedRun(directory)
    run.train(0, 16, media=True)
    (tmp_path / "secret").write_text("secret")
    (directory.media / "eval" / "sample_00000005.txt").unlink()
    (directory.media / "eval" / "sample_00000010.txt").unlink()
    (directory.media / "eval" / "sample_00000010.txt").symlink_to(tmp_path / "secret")
    rows = Rows(directory, NOTHING)
    rows.read()
    server = MLflowServer()
    server.open(describe(directory, "digest"), "")
    server.send(rows.before(None), in_doubt=False)
    assert [key for key in server._client.keys if key.startswith("media")] == ["media/eval: after 15"]
    assert "eval/sample of step 10 is left out: " in capsys.readouterr().out
