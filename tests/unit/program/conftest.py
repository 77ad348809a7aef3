"""Ranks of programs as real processes: `python -m hpctrain.program RUN`, as a launcher starts them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.config.cluster import Local
from hpctrain.config.health import Health
from hpctrain.config.root import ProgramConfig
from hpctrain.config.run import ProgramRun
from hpctrain.config.stored import to_yaml
from hpctrain.launch.local import rank_variables
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Ledger


class Zygote:
    """Forks ranks from a process that has imported all they need: 20 ms each instead of half a second."""

    def __init__(self):
        path = Path(__file__).parent / "programs" / "zygote.py"
        self._process = subprocess.Popen(
            [sys.executable, "-u", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = self._process.pid
        self._codes = {}
        self._pending = []
        self._rest = b""

    def start(self, **order):
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        while not self._pending:
            self._read(timeout=30)
        return Forked(self, self._pending.pop(0))

    def code(self, pid, timeout):
        deadline = time.monotonic() + timeout
        while pid not in self._codes:
            left = deadline - time.monotonic()
            assert left > 0, f"process {pid} doesn't end"
            self._read(left)
        return self._codes[pid]

    def ended(self):
        self._read(0)
        return self._codes

    def _read(self, timeout):
        if select.select([self._process.stdout], [], [], timeout)[0]:
            *lines, self._rest = (self._rest + os.read(self._process.stdout.fileno(), 4096)).split(b"\n")
            for line in lines:
                pid, *code = map(int, line.split())
                if code:
                    self._codes[pid] = code[0]
                else:
                    self._pending.append(pid)

    def close(self):
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@dataclass
class Forked:
    """A rank's process."""

    zygote: Zygote
    pid: int

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    @property
    def runs(self):
        return self.pid not in self.zygote.ended()

    def wait(self, timeout=30):
        return self.zygote.code(self.pid, timeout)


@pytest.fixture(scope="session")
def zygote():
    made = Zygote()
    yield made
    made.close()


@dataclass
class Program:
    """A program's run, and the ranks that a test starts."""

    directory: RunDirectory
    attempt: int
    folder: Path
    zygote: Zygote

    def start(self, rank=0, world_size=1, **variables):
        """Start a rank; its output goes into its log."""
        found = self.variables(rank, world_size, parent=self.zygote.pid) | variables
        return self.zygote.start(run=str(self.directory.path), log=str(self.directory.rank_log(rank)), variables=found)

    def variables(self, rank=0, world_size=1, *, parent):
        """The environment that a launcher gives a rank."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HPCTRAIN_")}
        environ |= rank_variables(rank, world_size, 29_123)
        return environ | LauncherFacts(attempt=self.attempt, logged=True, parent=parent).variables()

    def run(self, **variables):
        """Run rank zero to its end; return the exit code and the record."""
        code = self.start(**variables).wait(timeout=30)
        return code, self.record()

    def stopped(self, *numbers, when="ready", **variables):
        """Run rank zero, send signals once its program has made a file, and return the exit code and the record."""
        process = self.start(**variables)
        self.await_file(when)
        for number in numbers or (signal.SIGTERM,):
            process.send_signal(number)
            time.sleep(0.05)
        return process.wait(timeout=30), self.record()

    def end(self, process):
        """Kill the program of a rank, as a second Ctrl-C does, and wait until the rank has ended."""
        while process.runs:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        return process.wait()

    def await_file(self, name):
        """Wait until the program has made a file in its working directory; return its content."""
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        return (self.folder / name).read_text()

    def await_log(self, text):
        """Wait until the log of rank zero contains a text."""
        deadline = time.monotonic() + 20
        while text not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)

    def record(self, rank=0):
        """The exit record of a rank."""
        return read_exit_records(self.directory.attempt(self.attempt)).get(rank)

    def log(self, rank=0):
        """The output of a rank."""
        return self.directory.rank_log(rank).read_text()


@pytest.fixture
def program(directory, tmp_path, zygote):
    """Make a run of a command, in a working directory of its own."""
    folder = tmp_path / "work"
    folder.mkdir()

    def make(*command, attempt=None, health=None, cluster=None, args=None, nodes=1, **run):
        config = ProgramConfig(
            name="program",
            nodes=nodes,
            run_dir=str(directory.path),
            run=ProgramRun(command=list(map(str, command)), **run),
            args=args or {},
            health=Health(**(health or {})),
            cluster=Local(**(cluster or {})),
        )
        directory.config.write_text(to_yaml(config))
        directory.manifest.write_text(json.dumps({"folder": str(folder)}))
        return Program(directory, attempt or Ledger(directory).claim(), folder, zygote)

    return make
