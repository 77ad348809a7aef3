"""Start processes that have imported torch already: they are forked from one that has. `forked.py` is that process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "forked.py"
TIMEOUT_S = 150.0
INHERITED = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "HPCTRAIN")
"""Prefixes of variables that would tell a process that something else launched it."""


def clean_environment(*paths: Path) -> dict[str, str]:
    """The environment for a run of its own: one thread, these folders importable, no launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
    places = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places), "PYTHONWARNINGS": "error"}


@dataclass(frozen=True)
class Done:
    """A process that ended: its exit code (negative: a signal), what it printed, what its function returned."""

    pid: int
    code: int
    output: str
    result: object


class ForkServer:
    """Starts processes by forking one that has imported torch: 20 ms each instead of 2 s. Any thread may use it.

    Args:
        home: an empty folder, for what the processes print and return.
        variables: the environment of every process.
    """

    def __init__(self, home: Path, variables: dict[str, str]) -> None:
        self.home = home
        self.variables = variables
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._pending = b""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-u", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, cwd=home
        )
        os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, target: str, *arguments: object, folder: Path | None = None, **variables: str) -> int:
        """Start TARGET, MODULE:FUNCTION, and return the process's number."""
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
        """Wait until the processes with these numbers have ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while not all(number in self._codes for number in numbers):
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._fail(numbers)
            self._listen()
        return [self._done(number) for number in numbers]

    def code(self, number: int) -> int | None:
        """The exit code of the process with this number; None while it runs."""
        assert self._process.poll() is None, "the fork server has ended"
        self._listen()
        return self._codes.get(number)

    def kill(self, number: int) -> None:
        """Kill a process and all that it has started."""
        while number not in self._pids:
            self.code(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pids[number], signal.SIGKILL)

    def close(self) -> None:
        """End the fork server, and with it every process that still runs."""
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
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

    def _fail(self, numbers: tuple[int, ...]) -> None:
        printed = "".join(
            f"\n--- process {number}, exit code {self._codes.get(number)}\n{path.read_text() if path.exists() else ''}"
            for number in numbers
            for path in [self.home / f"output_{number}"]
        )
        for number in numbers:
            if number not in self._codes and number in self._pids:
                os.kill(self._pids[number], signal.SIGKILL)
        pytest.fail(f"processes didn't end within {TIMEOUT_S:g} s{printed}")
