"""W&B and MLflow with their own clients: offline files, a real MLflow server, and a stand-in for W&B's network."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import wave

import pytest

from hpctrain.files import append_json_line
from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason
from hpctrain.sync.sender import Cursor, cursor_path
from tests.support import wandb_files
from tests.support.logged_run import LoggedRun
from tests.support.wandb_server import KEY, WandbServer

WORDS = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "+task.num_samples=40",
    "+task.dropout=0.3",
    "trainer.global_batch_size=16",
    "trainer.max_steps=9",
    "logger.every_steps=1",
    "checkpoint.every_steps=2",
    "checkpoint.asynchronous=false",
    "data.num_workers=0",
)
pytestmark = pytest.mark.nightly
SUPPORT_S = 240.0
"""Seconds that a server may take to start on a loaded machine."""
PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde\x00\x00\x00\x0c"
    b"IDATx\x9cc\xf8\xcf\xc0\x00\x00\x03\x01\x01\x00\xc9\xfe\x92\xef\x00\x00\x00\x00IEND\xaeB`\x82"
)


@pytest.fixture
def environment(variables):
    """Of a `sync`: the clients' own modules have warnings."""
    return variables | {"PYTHONWARNINGS": "ignore", "WANDB_API_KEY": KEY}


@pytest.fixture
def wandb_server():
    pytest.importorskip("wandb")
    server = WandbServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory, free_ports):
    """A real one, with its store in SQLite."""
    pytest.importorskip("mlflow.server")
    folder, (port,) = tmp_path_factory.mktemp("mlflow"), free_ports(1)
    store = ["--backend-store-uri", f"sqlite:///{folder}/store.db"]
    artifacts = ["--artifacts-destination", str(folder / "artifacts"), "--default-artifact-root", "mlflow-artifacts:/"]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *store, *artifacts],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONWARNINGS": "ignore", "MLFLOW_DISABLE_TELEMETRY": "true"},
            start_new_session=True,
        )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + SUPPORT_S
    while not reaches(f"{address}/health"):
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.5)
    yield address
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reaches(address):
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
        return answer.status == 200
    return False


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    return LoggedRun(directory)


def sync(run, service, environment, *flags, **options):
    command = [sys.executable, "-m", "hpctrain", "sync", str(run.directory.path), "--service", service, *flags]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=SUPPORT_S, **options
    )


def sync_and_kill(run, service, environment, after_s):
    command = [sys.executable, "-m", "hpctrain", "sync", str(run.directory.path), "--service", service]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def as_sent(logged):
    """Records as W&B has them."""
    return [{**{key: value for key, value in row.items() if key != "step"}, "_step": row["step"]} for row in logged]


def add_media(run, step):
    """One of each kind."""
    folder = run.directory.media / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    with wave.open(str(folder / f"sound_{step:08d}.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\0\0" * 80)
    counts = {"counts": [1, 2], "edges": [0.0, 0.5, 1.0], "sum": 1.0, "sum_squares": 1.0, "left_out": 0}
    table = {"columns": ["name", "value"], "data": [["a", 1], ["b", "nan"], [None, 2.5]]}
    contents = {
        "image": ("picture", "png", PNG),
        "histogram": ("spread", "json", json.dumps(counts).encode()),
        "table": ("rows", "json", json.dumps(table).encode()),
        "audio": ("sound", "wav", None),
        "text": ("words", "txt", b"said"),
    }
    for kind, (name, suffix, data) in contents.items():
        path = folder / f"{name}_{step:08d}.{suffix}"
        if data is not None:
            path.write_bytes(data)
        file = str(path.relative_to(run.directory.path))
        append_json_line(
            run.directory.media_records,
            {"step": step, "time": 5.0, "name": f"eval/{name}", "kind": kind, "file": file},
        )


def offline_file(directory):
    (path,) = directory.sync.glob("wandb/offline-run-*/run-*.wandb")
    return path


def test_offline_files_read_back_are_the_records_and_media_of_the_run(run, environment):
    pytest.importorskip("wandb")
    add_media(run, 10)
    for end in (30, 60):  # the second time, the folder is replaced
        run.train(end - 30, end)
        run.train(end, end + 7, save=False)
        done = sync(run, "wandb", environment, "--offline")
        assert done.returncode == 0, done.stderr
        rows = wandb_files.rows(offline_file(run.directory))
        media = {key: value for key, value in rows[9].items() if isinstance(value, dict)}
        kinds = {"eval/picture": "image-file", "eval/spread": "histogram", "eval/rows": "table-file"}
        kinds |= {"eval/sound": "audio-file", "eval/words": "html-file"}
        assert {name: value["_type"] for name, value in media.items()} == kinds
        rows[9] = {key: value for key, value in rows[9].items() if key not in media}
        assert rows == as_sent([row for row in run.logged() if row["step"] < end])
    files = [path for path in run.directory.sync.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in files)


def test_wandbs_own_reader_sends_the_offline_files(run, environment, wandb_server):
    run.train(0, 30)
    run.end(Reason.COMPLETED, 30)
    assert sync(run, "wandb", environment, "--offline").returncode == 0
    folder = offline_file(run.directory).parent
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    done = subprocess.run(
        command,
        cwd=run.directory.path.parent,  # it writes its own log there
        env=environment | wandb_server.variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=SUPPORT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = Cursor.read(run.directory, "wandb_offline").run_id
    assert wandb_server.rows(run_id) == as_sent(run.logged())


def require_all_at_wandb(run, server):
    (run_id,) = server.runs
    rows = server.rows(run_id)
    media = [value for row in rows for value in row.values() if isinstance(value, dict)]
    files = server.runs[run_id]["files"]
    assert len(media) == 5 * 5
    assert [value["path"] for value in media if "path" in value and value["path"] not in files] == []
    rows = [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in rows]
    assert rows == as_sent(run.logged())
    assert server.runs[run_id]["exits"][-1] == 0
    assert server.runs[run_id]["summary"]["hpctrain/state"] == "completed"


def require_all_at_mlflow(run, server):
    from mlflow import MlflowClient

    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("hpctrain")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    for name in ("train/loss", "train/lr", "eval/loss"):
        history = [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, name)]
        assert sorted(history) == [(row["step"], row[name]) for row in run.logged() if name in row]
    files = {file.path for file in client.list_artifacts(found.info.run_id, "media/eval")}
    assert len(files) == 5 * 5
    assert found.data.params["trainer.max_steps"] == "100"


@pytest.mark.parametrize(
    ("service", "require_all", "seed", "longest_s"),
    [("wandb", require_all_at_wandb, 3, 6), ("mlflow", require_all_at_mlflow, 4, 5)],
    ids=["wandb", "mlflow"],
)
def test_senders_killed_anywhere_double_and_miss_nothing(
    run, environment, request, service, require_all, seed, longest_s
):
    server = request.getfixturevalue(f"{service}_server")
    environment |= server.variables if service == "wandb" else {"MLFLOW_TRACKING_URI": server}
    chance, end = random.Random(seed), 0
    for number in range(5):
        run.train(end, end + 250, save=False)
        run.train(end, end + 200)
        end += 200
        add_media(run, end - 10)
        if number == 2:
            cursor_path(run.directory, service).unlink(missing_ok=True)
        sync_and_kill(run, service, environment, after_s=chance.uniform(1.5, longest_s))
    run.end(Reason.COMPLETED, end)
    done = sync(run, service, environment)
    assert done.returncode == 0, done.stderr
    require_all(run, server)
    assert "nothing to send" in sync(run, service, environment).stdout


def test_a_wandb_that_refuses_is_one_line(run, environment, wandb_server):
    run.train(0, 10)
    wandb_server.refuses = 401
    done = sync(run, "wandb", environment | wandb_server.variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("hpctrain: error: ")
    wandb_server.refuses = 0
    assert sync(run, "wandb", environment | wandb_server.variables).returncode == 0
    (run_id,) = wandb_server.runs
    assert wandb_server.rows(run_id) == as_sent(run.logged()[:-1])


def test_without_a_key_it_is_one_line_and_nobody_is_asked(run, environment, wandb_server, tmp_path):
    run.train(0, 10)
    plain = {name: value for name, value in environment.items() if name != "WANDB_API_KEY"}
    plain |= {"WANDB_BASE_URL": wandb_server.address, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    done = sync(run, "wandb", plain, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "wandb login" in done.stderr.splitlines()[-1]


def copy_of(run, path):
    shutil.copytree(run.directory.path, path)
    return LoggedRun.at(RunDirectory.at(path))


def test_another_wandb_server_and_a_copy_get_the_whole_run_and_none_gets_a_row_twice(
    run, environment, wandb_server, tmp_path
):
    def steps(server, of):
        return [row["_step"] for row in server.rows(Cursor.read(of.directory, "wandb").run_id)]

    run.train(0, 10)
    assert sync(run, "wandb", environment | wandb_server.variables).returncode == 0
    copy = copy_of(run, tmp_path / "copy" / "run")
    copy.train(10, 30)
    assert sync(copy, "wandb", environment | wandb_server.variables).returncode == 0
    other = WandbServer()
    run.train(10, 20)
    assert sync(run, "wandb", environment | other.variables).returncode == 0
    assert steps(other, run) == list(range(1, 20))
    other.close()
    run.end(Reason.COMPLETED, 20)
    assert sync(run, "wandb", environment | wandb_server.variables).returncode == 0
    assert steps(wandb_server, run) == list(range(1, 21))
    assert steps(wandb_server, copy) == list(range(1, 30))
    assert len(wandb_server.runs) == 2
    program = """if True:
        import sys
        from hpctrain.run.directory import RunDirectory
        from hpctrain.sync.sent_run import describe
        from hpctrain.sync.sent_run import identify
        from hpctrain.sync.wandb import WandbOnline
        directory = RunDirectory.at(sys.argv[1])
        service = WandbOnline()
        print(service.open(describe(directory, identify(directory)), "").last_step)
        service.abandon()
    """
    command = [sys.executable, "-c", program, str(run.directory.path)]
    asked = subprocess.run(
        command,
        env=environment | wandb_server.variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=SUPPORT_S,
    )
    assert asked.stdout.splitlines()[-1] == "20", asked.stderr


def test_without_a_server_mlflow_takes_a_database_and_refuses_a_folder(run, environment, tmp_path):
    pytest.importorskip("mlflow.server")
    run.train(0, 4)
    done = sync(run, "mlflow", environment, "--server", f"{tmp_path}/store", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hpctrain: error: MLflow refuses the folder {tmp_path}/store: name a server")
    done = sync(run, "mlflow", environment, "--server", f"sqlite:///{tmp_path}/mlflow.db", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    allowed = environment | {"MLFLOW_ALLOW_FILE_STORE": "true"}
    done = sync(run, "mlflow", allowed, "--server", f"{tmp_path}/store", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_another_mlflow_experiment_a_deleted_run_and_a_copy_get_the_whole_run(
    run, environment, mlflow_server, tmp_path
):
    from mlflow import MlflowClient

    client, environment = MlflowClient(mlflow_server), environment | {"MLFLOW_TRACKING_URI": mlflow_server}

    def sent(of):
        assert sync(of, "mlflow", environment).returncode == 0
        run_id = Cursor.read(of.directory, "mlflow").run_id
        steps = sorted(metric.step for metric in client.get_metric_history(run_id, "train/loss"))
        return run_id, steps

    def choose(experiment):
        logger = {"mlflow": {"experiment": experiment}}
        run.directory.config.write_text(json.dumps({"name": "made", "logger": logger}))

    choose("first")
    run.train(0, 10)
    first, steps = sent(run)
    assert steps == list(range(1, 10))
    copy = copy_of(run, tmp_path / "copy" / "run")
    copy.train(10, 30)
    second, steps = sent(copy)
    assert (second != first, steps) == (True, list(range(1, 30)))
    client.delete_run(first)
    run.train(10, 20)
    third, steps = sent(run)
    assert (third not in (first, second), steps) == (True, list(range(1, 20)))
    choose("second")
    fourth, steps = sent(run)
    assert (fourth != third, steps) == (True, list(range(1, 20)))
    choose("first")
    run.end(Reason.COMPLETED, 20)
    assert sent(run) == (third, list(range(1, 21)))
    assert "nothing to send" in sync(run, "mlflow", environment).stdout


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_training_that_is_killed_three_times_is_one_run_without_a_doubled_point(
    train, environment, wandb_server, world_size, mode
):
    words = [*WORDS, "logger.wandb.enabled=true", f"logger.wandb.mode={mode}"]
    own = environment | wandb_server.variables
    given = {name: own[name] for name in ("PYTHONWARNINGS", "WANDB_API_KEY", "WANDB_BASE_URL")}
    # each attempt begins at the last even step, and every rank dies in the third step from there
    act = ",".join(f"{rank}:3:SIGKILL" for rank in range(world_size))
    for killed_by in (act, act, act, ""):
        code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=killed_by, **given)
        assert code == (-9 if killed_by else 0), output
    logged = LoggedRun.at(run.directory).logged()
    cursor = Cursor.read(run.directory, "wandb_offline" if mode == "offline" else "wandb")
    if not cursor.complete:
        # on a loaded machine, ten seconds may be too few: then the run says what to type
        assert "send the rest with: python -m hpctrain sync" in output
        flags = ["--offline"] if mode == "offline" else []
        assert sync(LoggedRun.at(run.directory), "wandb", own, *flags).returncode == 0
    if mode == "offline":
        rows = wandb_files.rows(offline_file(run.directory))
    else:
        (run_id,) = wandb_server.runs
        rows = wandb_server.rows(run_id)
    assert rows == as_sent(logged)


@pytest.mark.parametrize("how", ["down", "refuses", "hangs"])
def test_a_service_that_fails_costs_a_training_nothing_but_the_wait_at_its_end(
    train, environment, wandb_server, free_ports, how
):
    own = environment | wandb_server.variables
    if how == "down":
        own["WANDB_BASE_URL"] = f"http://127.0.0.1:{free_ports(1)[0]}"
    elif how == "refuses":
        wandb_server.refuses = 403
    else:
        wandb_server.lock.acquire()
    given = {name: own[name] for name in ("PYTHONWARNINGS", "WANDB_API_KEY", "WANDB_BASE_URL")}
    words = [*WORDS, "logger.wandb.enabled=true", "logger.sync_timeout_s=3"]
    code, run, output = train("run", *words, world_size=2, **given)
    assert code == 0, output
    assert "send the rest with: python -m hpctrain sync" in output
    # from the record of the end, which precedes the wait
    (attempt,) = run.attempts
    assert attempt == (0, "completed", 9)
    if how == "hangs":
        wandb_server.lock.release()
    wandb_server.refuses = 0
    assert sync(LoggedRun.at(run.directory), "wandb", environment | wandb_server.variables).returncode == 0
    (run_id,) = wandb_server.runs
    assert wandb_server.rows(run_id) == as_sent(LoggedRun.at(run.directory).logged())
