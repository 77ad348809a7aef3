"""A real SLURM for the tests of this folder: sandboxes by their options, as good as new for every test.

Every test here has the marker `slurm`. Where no sandbox can run they are all skipped with one line; with
HPCTRAIN_REQUIRE_SLURM=1 in the environment they fail instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.slurm.programs.disk import Disk, mount, unmount
from tests.slurm.programs.leftovers import assert_nothing_is_left
from tests.slurm.programs.submitted_runs import Straight, SubmittedRuns
from tests.support.fork_server import ForkServer

PROGRAM = Path(__file__).parents[2] / "slurm" / "sandbox"
STATES = Path("/run/slurm-sandbox")
DISKS = Path("/run/slurm-sandbox-disks")
IMPOSSIBLE = "no SLURM on this machine"
SILENT = re.compile(r"timed out|unable to contact|connect failure|connection refused", re.IGNORECASE)
"""What SLURM's commands print when the controller of a busy machine answers late."""
FIELD = re.compile(r"(\S+?)=(.*?)(?= \S+?=|\s*$)")


class SlurmSandbox:
    """A sandbox that is up, driven by `python slurm/sandbox --name NAME`.

    Attributes:
        name: Its name.
        environ: For subprocesses: this process's environment without SLURM's variables, and SLURM_CONF.
        nodes: The nodes' names.
    """

    def __init__(self, name: str, *options: str) -> None:
        self.name = name
        self.command("up", *options, timeout=120)
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))},
            "SLURM_CONF": str(STATES / name / "slurm.conf"),
        }
        self.nodes = sorted(self.ask("sinfo", "--noheader", "--Node", "--partition=low", "--format=%n").split())

    def command(self, *argv: str, timeout: float = 90) -> str:
        """Run a command of the sandbox's program; returns what it printed."""
        done = subprocess.run(
            [sys.executable, str(PROGRAM), argv[0], "--name", self.name, *argv[1:]],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode == 2 and argv[0] == "up" and not done.stderr.startswith("usage:"):
            raise SandboxImpossibleError(done.stderr.strip())
        assert done.returncode == 0, f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def run(
        self,
        cmd: Sequence[str],
        *,
        timeout: float = 60,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host, connected to this SLURM; `env` adds variables. Past the timeout it is killed."""
        with subprocess.Popen(
            cmd,
            cwd=cwd,
            env={**self.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(cmd, process.returncode, out, err)

    def ask(self, *argv: str, done_before: str = "") -> str:
        """Run a command of SLURM, again while the controller doesn't answer; returns what it printed.

        `done_before` is part of the error where an earlier call had its effect, though its answer was lost.
        """
        deadline, repeated = time.monotonic() + 60, False
        while SILENT.search((done := self.run(argv)).stderr) and time.monotonic() < deadline:
            repeated = True
            time.sleep(0.2)
        accepted = done.returncode == 0 or (repeated and done_before and done_before in done.stderr)
        assert accepted, f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def requeue(self, job_id: str) -> None:
        """`scontrol requeue`."""
        self.ask("scontrol", "requeue", job_id, done_before="Job is pending execution")

    def on(self, node: str, *argv: str) -> str:
        """Run a command on a node; returns what it printed."""
        return self.command("on", node, "--", *argv)

    def kill_node(self, node: str) -> None:
        """Kill the node: SLURM has to notice by itself."""
        self.command("kill-node", node)

    def revive_node(self, node: str) -> None:
        """Return the node to service."""
        self.command("revive-node", node)

    def cut(self, node: str) -> None:
        """Disconnect the node; its processes live on."""
        self.command("cut", node)

    def slow(self, node: str) -> None:
        """Let the node's link carry only 20 Mbit/s in each direction."""
        self.command("slow", node)

    def lossy(self, node: str) -> None:
        """Let the node's link lose 2 % of its packets in each direction."""
        self.command("lossy", node)

    def mend(self, node: str) -> None:
        """Make the node's link whole, connect the node and return it to service."""
        self.command("mend", node)

    def preempt(self, nodes: int | None = None, seconds: int = 5) -> str:
        """Submit a job that takes whole nodes (default: all) from jobs in the partition `low`; returns its job id."""
        size = [] if nodes is None else ["--nodes", str(nodes)]
        return self.command("preempt", *size, "--seconds", str(seconds)).strip()

    def submit(self, *argv: str, timeout: float = 60) -> str:
        """Run `sbatch --parsable` with these arguments; returns the job id. By default its output is discarded."""
        done = self.run(["sbatch", "--parsable", "--output=/dev/null", *argv], timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`; of the first one for an array."""
        return dict(FIELD.findall(self.ask("scontrol", "--oneliner", "show", "job", job_id).splitlines()[0]))

    def wait_job(self, job_id: str, states: str | Collection[str], timeout: float = 120) -> dict[str, str]:
        """Wait until the job's JobState is (one of) `states`; returns its fields."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while (job := self.job(job_id))["JobState"] not in wanted:
            assert time.monotonic() < deadline, f"after {timeout:g} s job {job_id} is not {'/'.join(wanted)}: {job}"
            time.sleep(0.2)
        return job

    def wait_requeued(self, job_id: str) -> None:
        """Wait until the job was requeued once, and its first attempt's nodes are free."""
        deadline = time.monotonic() + 120
        while (job := self.job(job_id))["Restarts"] != "1" or job["JobState"] == "COMPLETING":
            assert time.monotonic() < deadline, f"after 120 s job {job_id} is not requeued: {job}"
            time.sleep(0.2)

    def node_state(self, node: str) -> str:
        """The node's state in sinfo's short form, such as `idle`, `alloc`, `down*`."""
        return self.ask("sinfo", "--noheader", "--partition=low", f"--nodes={node}", "--format=%t").strip()

    def wait_node(self, node: str, states: str | Collection[str], timeout: float = 120) -> str:
        """Wait until the node's state is (one of) `states`; returns it."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while (state := self.node_state(node)) not in wanted:
            assert time.monotonic() < deadline, f"after {timeout:g} s {node} is not {'/'.join(wanted)} but {state}"
            time.sleep(0.2)
        return state

    def reset(self) -> None:
        """No jobs, and every node alive, connected and idle."""
        self.command("reset")

    def down(self) -> None:
        """Take it down."""
        self.command("down")


class SandboxImpossibleError(Exception):
    """No sandbox can run on this machine; the message says what is missing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("slurm")
            # several waits in a row, each with its own time limit, end a test that fails
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give every skip for want of SLURM the same location, so that pytest folds them into one line."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and IMPOSSIBLE in report.longrepr[2]:
        report.longrepr = (__file__, 1, report.longrepr[2].removeprefix("Skipped: "))
    return report


class SandboxPool:
    """Sandboxes by their options, which tests take one after the other."""

    def __init__(self) -> None:
        self._sandboxes: dict[tuple[str, ...], SlurmSandbox] = {}

    def take(self, *options: str) -> SlurmSandbox:
        """A sandbox with these options and without jobs, whose nodes are all alive, connected and idle."""
        if options in self._sandboxes:
            self._sandboxes[options].reset()
        else:
            self._sandboxes[options] = _start(f"-p{len(self._sandboxes)}", *options)
        return self._sandboxes[options]

    def close(self) -> None:
        """Take them down."""
        for sandbox in self._sandboxes.values():
            sandbox.down()


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[SandboxPool]:
    """The sandboxes of this session."""
    _take_down_what_dead_sessions_left()
    pool = SandboxPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def disks() -> Iterator[Path]:
    """A folder for file systems, which is mounted before any sandbox starts: nodes see what is mounted in it later."""
    # not in pytest's own folders: it couldn't delete what a killed session has left mounted, and would fail
    folder = DISKS / f"pytest-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        mount("-t", "tmpfs", "-o", "size=1m", "disks", str(folder))
        mount("--make-shared", str(folder))
    except (OSError, subprocess.CalledProcessError):
        # who may not mount can't start a sandbox either, and its error says why the tests are skipped
        yield folder
        return
    yield folder
    unmount(folder)
    folder.rmdir()


@pytest.fixture
def sandbox(request: pytest.FixtureRequest, disks: Path, sandboxes: SandboxPool) -> SlurmSandbox:
    """A sandbox as good as new, with the options of the test's marker `sandbox`; by default four nodes."""
    marker = request.node.get_closest_marker("sandbox")
    return sandboxes.take(*(marker.args if marker else ()))


@pytest.fixture
def start_sandbox() -> Iterator[Callable[..., SlurmSandbox]]:
    """Start a sandbox for this test alone, with options such as `start_sandbox("--nodes=2", "--accounting")`."""
    started: list[SlurmSandbox] = []

    def start(*options: str) -> SlurmSandbox:
        started.append(_start(f"-{len(started) + 1}", *options))
        return started[-1]

    yield start
    for each in started:
        each.down()


@pytest.fixture(scope="session")
def straight(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Runs that nothing interrupts."""
    return Straight(tmp_path_factory.mktemp("straight"), fork_server)


@pytest.fixture
def disk(disks: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """A small file system for a test's runs."""
    disk = Disk(disks / re.sub(r"\W+", "_", request.node.name))
    yield disk
    disk.remove()


@pytest.fixture
def runs(
    sandbox: SlurmSandbox, straight: Straight, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[SubmittedRuns]:
    """Submits runs to the test's sandbox, onto its disk where it has one; at the end nothing of them may be left."""
    disk = request.getfixturevalue("disk") if "disk" in request.fixturenames else None
    submitted = SubmittedRuns(sandbox, tmp_path, straight, disk)
    yield submitted
    assert_nothing_is_left(sandbox, submitted.runs)


def _start(suffix: str, *options: str) -> SlurmSandbox:
    try:
        return SlurmSandbox(f"pytest-{os.getpid()}{suffix}", *options)
    except SandboxImpossibleError as error:
        if os.environ.get("HPCTRAIN_REQUIRE_SLURM"):
            raise
        pytest.skip(f"{IMPOSSIBLE}: {error}")


def _take_down_what_dead_sessions_left() -> None:
    if os.geteuid() != 0:
        return
    for path in STATES.glob("pytest-*"):
        if _is_dead(path):
            subprocess.run([sys.executable, str(PROGRAM), "down", "--name", path.name], check=True)
    for path in DISKS.glob("pytest-*"):
        if _is_dead(path):
            subprocess.run(["umount", "--recursive", "--lazy", str(path)], stderr=subprocess.DEVNULL, check=False)
            with contextlib.suppress(OSError):  # another worker was here first
                path.rmdir()


def _is_dead(path: Path) -> bool:
    """Whether the session that made a folder has ended."""
    return not Path("/proc", path.name.split("-")[1]).exists()
