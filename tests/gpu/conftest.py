"""Fixtures of the tests on a GPU.

`pytest --numprocesses=8 --dist=loadgroup --no-loadscope-reorder tests/gpu` runs several files, or groups of tests, at a
time, the longest first. `-m core` selects the most telling tests, which take about a minute.

HPCTRAIN_GPU_TESTS_DEVICE=cpu runs the same tests on the CPU, without those marked `needs_cuda`. It tests the tests: the
minutes on a GPU are few, and a name that has changed must not cost them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.files import read_json_lines
from hpctrain.parallel.mesh import join_mesh
from hpctrain.rank.world import join
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.train.profiling.sampler import MODE_WARNING, SYNC_WARNING
from tests.support.fork_server import clean_environment

TESTS = Path(__file__).parents[1]
PROGRAMS = (TESTS / "gpu" / "programs", TESTS / "multiprocess" / "programs")
DEVICE_VARIABLE = "HPCTRAIN_GPU_TESTS_DEVICE"
FAILURES_VARIABLE = "HPCTRAIN_GPU_TESTS_FAILURES"
"""Variable with a file, to which a line of JSON is added for each failure."""
ON_CPU = os.environ.get(DEVICE_VARIABLE, "cuda") == "cpu"
NO_CUDA = f"no CUDA on this machine, and {DEVICE_VARIABLE} is not cpu: nothing of tests/gpu was run"
LONGEST_S = 240.0
"""Seconds until a command counts as stuck."""
AT_ONCE = min(5, os.cpu_count() or 1)
"""Commands at a time: starting one takes seconds of a core, and half a GB of the GPU."""
LONGEST_FIRST = (
    "test_interrupted.py",
    "test_exact_resume.py",
    "test_batch_sizes.py",
    "test_failures.py",
    "test_hangs.py",
)
"""Files that begin first, so that no worker begins one of them when the others end."""
QUIET = ("logger.tensorboard=false", "code.snapshot=none")


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(items):
    """Put the longest files of this folder first, and on the CPU skip what needs CUDA."""
    own = [item for item in items if item.path.parent == TESTS / "gpu"]
    places = [place for place, item in enumerate(items) if item.path.parent == TESTS / "gpu"]
    for place, item in zip(places, sorted(own, key=run_order), strict=True):
        items[place] = item
        if item.get_closest_marker("apart"):
            item.add_marker(pytest.mark.xdist_group(f"test {place}"))
        # a fixture would skip too late: those of a module come first
        if ON_CPU and (needs := item.get_closest_marker("needs_cuda")):
            item.add_marker(pytest.mark.skip(f"needs CUDA: {needs.args[0]}"))


def run_order(item):
    name = item.path.name
    file = LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)
    return item.get_closest_marker("slow") is None, file


def pytest_runtest_logreport(report):
    """Write each failure at once, if asked: the time on a GPU may be over before pytest prints it."""
    if report.failed and FAILURES_VARIABLE in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[FAILURES_VARIABLE]).open("a") as lines:
            lines.write(json.dumps({"test": report.nodeid, "text": report.longreprtext}) + "\n")


@pytest.fixture(scope="session", autouse=True)
def cuda():
    """Skips every test of this folder on a machine without CUDA, unless the CPU takes its place."""
    if not ON_CPU and not torch.cuda.is_available():
        pytest.skip(NO_CUDA)


@pytest.fixture(scope="session")
def device():
    return torch.device("cpu") if ON_CPU else torch.device("cuda", 0)


class Shell:
    """A folder in which a user types commands of hpctrain, on one GPU; the run is its folder R.

    Args:
        folder: is made.
        variables: of every command.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.run = RunDirectory.at(folder / "R")
        self.programs = PROGRAMS
        self.environ = clean_environment() | variables
        del self.environ["PYTHONWARNINGS"]  # drivers and compilers warn too
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        self.environ.setdefault("CUDA_VISIBLE_DEVICES", listed.partition(",")[0])
        if ON_CPU:
            self.environ |= {"CUDA_VISIBLE_DEVICES": "", DEVICE_VARIABLE: "cpu"}

    def start(self, *words, **variables):
        """Start a command, with more variables of its environment."""
        if ON_CPU:
            # refused without an NVIDIA GPU
            words = [word.replace("precision=tf32", "precision=fp32") for word in words]
        return subprocess.Popen(
            [sys.executable, "-m", "hpctrain", *words],
            cwd=self.folder,
            env=self.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, process, code=0):
        """Wait for a command, which must end with this code; return what it printed, and the errors that it printed."""
        try:
            out, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"the command didn't end within {LONGEST_S:g} s\n{out}{err}")
        assert process.returncode == code, out + err
        return out, err

    def type(self, *words, code=0, **variables):
        """Start a command, and wait."""
        return self.wait(self.start(*words, **variables), code)

    def train(self, *words, code=0, **variables):
        """Start the run R, or resume it by the same command."""
        return self.wait(self.start_training(*words, **variables), code)

    def start_training(self, *words, **variables):
        """Start the run R, or resume it, without waiting."""
        return self.start(f"run_dir={self.run.path}", *QUIET, *words, **variables)

    @property
    def inspected(self):
        """The report on the run's checkpoints."""
        return json.loads(self.type("inspect", str(self.run.path), "--json")[0])

    @property
    def digest(self):
        return self.inspected["weights_digest"]

    @property
    def attempts(self):
        return Ledger(self.run).attempts()

    @property
    def last_line(self):
        """The last record of attempts.jsonl."""
        return json.loads(self.run.attempts.read_text().splitlines()[-1])

    @property
    def exit_records(self):
        """Those of the newest attempt, by rank."""
        return read_exit_records(self.run.attempt(len(self.attempts)))

    def logged(self, name):
        return [record[name] for record in read_json_lines(self.run.metrics) if name in record]

    @property
    def metrics(self):
        """Records without what depends on the clock."""
        timed = ("time", "throughput/", "memory/")
        return [
            {name: value for name, value in record.items() if not name.startswith(timed)}
            for record in read_json_lines(self.run.metrics)
        ]

    def weights(self, step):
        return torch.load(self.run.checkpoint(step) / "model.pt", weights_only=True)

    @property
    def processes(self):
        """Command lines that name the run directory; a zombie's is empty."""
        lines = []
        # from /proc, because a container may lack ps
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        return [line for line in lines if str(self.run.path) in line]


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path / "typed")


@pytest.fixture(scope="module")
def shells(tmp_path_factory):
    """Makes a folder in which commands are typed, by name; tests of a module share it."""
    made = {}
    # threads that call mktemp first would each try to make it
    tmp_path_factory.getbasetemp()

    def shell(name, **variables):
        if name not in made:
            made[name] = Shell(tmp_path_factory.mktemp("shell"), **variables)
        return made[name]

    return shell


@pytest.fixture(scope="session")
def at_once():
    """Calls a function with each argument, several at a time; returns the results in order."""

    def call(function, arguments):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(function, arguments))

    return call


@pytest.fixture(scope="session")
def composer():
    return Composer()


@contextlib.contextmanager
def sync_debug_mode(mode):
    if ON_CPU:
        yield []
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=mode == "warn") as found:
        warnings.filterwarnings("ignore", message=MODE_WARNING)
        if mode == "warn":
            warnings.filterwarnings("always", message=SYNC_WARNING)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def no_waits():
    """In this context, a call that waits for the GPU raises an error."""
    return lambda: sync_debug_mode("error")


@pytest.fixture(scope="session")
def counted_waits():
    """In this context, each call that waits for the GPU adds a warning to a list."""
    return lambda: sync_debug_mode("warn")


@pytest.fixture
def joined():
    """Joins a world of one rank with a store, and so with a group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)

    def join_with(*devices):
        environment = ClusterEnvironment.from_environment({})
        return join_mesh(join(environment, store, backend="auto", devices=devices, timeout_s=60), None, 60)

    yield join_with
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def wait_until():
    """Waits for a condition."""

    def wait(condition, timeout_s=LONGEST_S):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait
