"""Start processes that have imported torch already: children of multiprocessing's fork server.

A `multiprocessing.Process` shares its parent's output, session, environment and working directory, and loses what its
function returns. `_child` gives it its own, and ends it as `os._exit` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

from hpctrain.run.process import environ_replaced

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = "tests.multiprocess.programs"
TIMEOUT_S = 150.0
INHERITED = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "HPCTRAIN")
"""Prefixes of variables that would tell a process that something else launched it."""
PR_SET_PDEATHSIG = 1


def clean_environment() -> dict[str, str]:
    """The environment for a run of its own: one thread, the programs of `tests` importable, no launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
    places = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
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
        self._processes: list[multiprocessing.Process] = []
        self._lock = threading.Lock()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.preloaded"])
        # of a process that is killed, what it printed stays
        server = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        with environ_replaced(variables | server):
            forkserver.ensure_running()

    def start(self, target: str, *arguments: object, folder: Path | None = None, **variables: str) -> int:
        """Start TARGET, MODULE:FUNCTION, and return the process's number.

        A module without a package is a program of tests/multiprocess.
        """
        with self._lock:
            number = len(self._processes)
            order = (target, arguments, folder or self.home, self.variables | variables, self._files(number))
            self._processes.append(self._context.Process(target=_child, args=order))
            with _no_main():
                self._processes[number].start()
        return number

    def wait(self, *numbers: int) -> list[Done]:
        """Wait until the processes with these numbers have ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(self.code(number) is None for number in numbers):
            if time.monotonic() > deadline:
                self._fail(numbers)
            time.sleep(0.005)
        return [self._done(number) for number in numbers]

    def code(self, number: int) -> int | None:
        """The exit code of the process with this number; None while it runs."""
        with self._lock:
            return self._processes[number].exitcode

    def kill(self, number: int) -> None:
        """Kill a process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[number].pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill every process that still runs."""
        for number in range(len(self._processes)):
            if self.code(number) is None:
                self.kill(number)

    def _files(self, number: int) -> tuple[Path, Path]:
        return self.home / f"output_{number}", self.home / f"result_{number}"

    def _done(self, number: int) -> Done:
        output, result = self._files(number)
        text = output.read_text(errors="replace") if output.exists() else ""
        returned = json.loads(result.read_text()) if result.exists() else None
        return Done(self._processes[number].pid, self.code(number), text, returned)

    def _fail(self, numbers: tuple[int, ...]) -> None:
        printed = "".join(
            f"\n--- process {number}, exit code {done.code}\n{done.output}"
            for number in numbers
            for done in [self._done(number)]
        )
        for number in numbers:
            if self.code(number) is None:
                self.kill(number)
        raise TimeoutError(f"processes didn't end within {TIMEOUT_S:g} s{printed}")


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Otherwise each process would run the script again that started pytest: multiprocessing restores `__main__`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _child(
    target: str, arguments: tuple[object, ...], folder: Path, variables: dict[str, str], files: tuple[Path, Path]
) -> None:
    """Call `target`, MODULE:FUNCTION, which returns an exit code or a result, as a process of its own."""
    from tests.support import preloaded

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # with it, the server would outlive the tests as long as this process does
    os.close(forkserver._forkserver._forkserver_alive_fd)
    # not the fork server's, for the processes that it starts itself: their parent would be that server
    multiprocessing.set_start_method(None, force=True)
    os.setsid()  # processes that it leaves running are found by their session
    output, result = files
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = [target]
    sys.path[:] = dict.fromkeys([*variables["PYTHONPATH"].split(os.pathsep), *preloaded.SEARCH_PATH])
    code = 99
    try:
        code = _call(target, arguments, result)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(target: str, arguments: tuple[object, ...], result: Path) -> int:
    """Return the exit code of a function's process."""
    module, _, function = target.partition(":")
    try:
        imported = importlib.import_module(module if "." in module else f"{PROGRAMS}.{module}")
        returned = getattr(imported, function)(*arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 99
    if returned is None or isinstance(returned, int):
        return returned or 0
    result.write_text(json.dumps(returned))
    return 0
