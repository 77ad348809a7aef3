from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.files import read_json_lines
from hpctrain.launch.local import rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger

PROGRAMS = Path(__file__).parent / "programs"
sys.path.append(
    str(PROGRAMS)
)  # tests share words with the programs that they start; last, since names repeat elsewhere
PATIENCE_S = 150.0
FOREIGN = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "HPCTRAIN")


@dataclass(frozen=True)
class Done:
    """A process that ended: its exit code (negative: a signal), what it printed, what its function returned."""

    pid: int
    code: int
    output: str
    result: object


class Nursery:
    """Starts processes that have torch already; `programs/nursery.py` is the other side. Any thread may ask."""

    def __init__(self, home: Path, variables: dict[str, str]) -> None:
        self.home, self.variables = home, variables
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._pending = b""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-u", PROGRAMS / "nursery.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            cwd=home,
        )
        os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, target: str, *arguments: object, folder: Path | None = None, **variables: str) -> int:
        """Start TARGET, MODULE:FUNCTION, and return its number."""
        number = next(self._numbers)
        order = {
            "number": number,
            "target": target,
            "arguments": arguments,
            "folder": str(folder or self.home),
            "variables": self.variables | variables,
            "output": str(self.home / f"output_{number}"),
            "result": str(self.home / f"result_{number}"),
        }
        with self._lock:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        return number

    def wait(self, *numbers: int) -> list[Done]:
        """The processes with these numbers, once all have ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(number in self._codes for number in numbers):
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._give_up(numbers)
            self._listen()
        return [self._done(number) for number in numbers]

    def code(self, number: int) -> int | None:
        """The exit code of the process with this number; None while it runs."""
        assert self._process.poll() is None, "the nursery is gone"
        self._listen()
        return self._codes.get(number)

    def kill(self, number: int) -> None:
        """End a process, and all that it has started."""
        while number not in self._pids:
            self.code(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pids[number], signal.SIGKILL)

    def close(self) -> None:
        """End; a process that still runs goes as well."""
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()

    def _listen(self) -> None:
        with self._lock:
            data = self._process.stdout.read()
            *lines, self._pending = (self._pending + (data or b"")).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if "code" in answer:
                    self._codes[answer["number"]] = answer["code"]
                else:
                    self._pids[answer["number"]] = answer["pid"]
        if not data:
            time.sleep(0.005)

    def _done(self, number: int) -> Done:
        output, result = self.home / f"output_{number}", self.home / f"result_{number}"
        text = output.read_text(errors="replace") if output.exists() else ""
        returned = json.loads(result.read_text()) if result.exists() else None
        return Done(self._pids[number], self._codes[number], text, returned)

    def _give_up(self, numbers: tuple[int, ...]) -> None:
        said = "".join(
            f"\n--- process {number}, exit code {self._codes.get(number)}\n{path.read_text() if path.exists() else ''}"
            for number in numbers
            for path in [self.home / f"output_{number}"]
        )
        for number in numbers:
            if number not in self._codes and number in self._pids:
                os.kill(self._pids[number], 9)
        pytest.fail(f"processes don't end{said}")


@pytest.fixture(scope="session")
def variables():
    """The environment of every process: one thread, the programs beside the tests, no launcher's leftovers."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return own | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "error"}


@pytest.fixture(scope="session")
def nursery(tmp_path_factory, variables):
    nursery = Nursery(tmp_path_factory.mktemp("nursery"), variables)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def free_ports():
    """Gives ports that nothing uses, and that nobody is given who asks for any."""

    def find(count):
        found = set()
        while len(found) < count:
            port = random.SystemRandom().randrange(10_000, 32_000)
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                found.add(port)
        return list(found)

    return find


@pytest.fixture
def port(free_ports):
    (port,) = free_ports(1)
    return port


@pytest.fixture
def ranks(nursery, port):
    """Calls a function in `world_size` processes that know their place from torchrun's variables; waits for all."""

    def run(target, *arguments, world_size, **variables):
        places = [rank_variables(rank, world_size, port) for rank in range(world_size)]
        return nursery.wait(*(nursery.start(target, *arguments, **place, **variables) for place in places))

    return run


class Run:
    """What a run directory tells."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory.at(path)

    @property
    def attempts(self):
        return [(entry.start_step, str(entry.reason), entry.end_step) for entry in Ledger(self.directory).attempts()]

    @property
    def digest(self) -> str:
        """Of the newest checkpoint's weights."""
        return list_checkpoints(self.directory)[-1].weights_digest

    @property
    def steps(self):
        return [info.step for info in list_checkpoints(self.directory) if info.intact]

    @property
    def metrics(self):
        """Records without what depends on the clock."""
        return [
            {
                name: value
                for name, value in record.items()
                if name != "time" and not name.startswith(("throughput/", "memory/"))
            }
            for record in read_json_lines(self.directory.metrics)
        ]


@pytest.fixture
def run_at():
    """What a run directory tells, as it is when it is asked."""
    return Run


@pytest.fixture(scope="session")
def composer():
    return Composer()


@pytest.fixture
def train(nursery, ranks, composer, tmp_path, monkeypatch):
    """Starts a run, or goes on with it: one rank in the launching process itself, several as a launcher would.

    Composing takes longer than all the rest, so it is done here, once.
    """
    monkeypatch.syspath_prepend(PROGRAMS)
    prepared = {}

    def run(name, *words, world_size=1, **variables):
        path = tmp_path / name
        if prepared.get(path) != words:
            prepare(composer.compose([f"run_dir={path}", *words], world_size=world_size), words)
            prepared[path] = words
        if world_size == 1:
            done = nursery.wait(nursery.start("command:run", "resume", str(path), folder=tmp_path, **variables))
        else:
            done = ranks("command:rank", str(path), world_size=world_size, **variables)
        codes = {process.code for process in done}
        assert len(codes) == 1, "\n".join(f"exit code {process.code}\n{process.output}" for process in done)
        return codes.pop(), Run(path), done[0].output

    return run
