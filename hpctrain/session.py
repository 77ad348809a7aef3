"""Report to hpctrain from any program, and learn when to stop.

Standard library only: import it from hpctrain, or copy this file into a project. Outside of a run of hpctrain, every
function works and reports nothing. Example; all ranks call `should_stop` after each step:

    session.start(total_steps=1000)
    save = session.last_save()
    step = load(save.path) if save else 0
    while step < 1000:
        loss = train_one_batch()
        step += 1
        session.step(step, {"train/loss": loss})
        stop = session.should_stop()
        if stop or step % 100 == 0:
            path = write(session.checkpoint_dir(), step)
            session.saved(step, path)
        if stop:
            sys.exit()  # without done(), the run is requeued
    session.done()

The protocol is in docs/reference/session.md of hpctrain.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import operator
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Mapping, NamedTuple  # noqa: UP035 - Python 3.9

STEP_EVERY_S = 0.05  # between reports of steps that have no metrics
DEADLINE_MARGIN_S = 30.0  # before the deadline; or a tenth of the program's time, if that is less
WAIT_S, METRICS_WAIT_S = 5.0, 1.0  # while the pipe is full; a step without metrics doesn't wait
MAX_LINE = 4096  # bytes; Linux may tear longer ones (PIPE_BUF)
AGREE_EVERY_S, MAX_CALLS, LONG_STEP_S = 0.02, 16, 0.5


class Save(NamedTuple):
    """A reported save: the number of completed optimizer steps, and the file or folder."""

    step: int
    path: Path


class _Session:
    def __init__(self, forked_from: _Session | None = None) -> None:
        self.forked_from = forked_from  # kept: to end its groups would wait for threads that this process doesn't have
        self.muted = forked_from is not None
        self.folder = os.environ.get("HPCTRAIN_SESSION", "")
        self.deadline = float(os.environ.get("HPCTRAIN_DEADLINE") or math.inf)
        self.margin_s = min(DEADLINE_MARGIN_S, (self.deadline - time.time()) / 10)
        self.started = self.stopping = self.agreed = self.stalled = self.warned = False
        self.handlers: dict[int, Any] = {}
        self.stacks: Any = None
        self.pipe: int | None = None
        self.newest: int | None = None
        self.reported_at = -math.inf
        self.signalled = ""
        self.agreement: _Agreement | None = None

    def install(self) -> None:
        for name in {"TERM", os.environ.get("HPCTRAIN_STOP_SIGNAL") or "TERM"}:
            number = getattr(signal, "SIG" + name)
            if number not in self.handlers:
                self.handlers[number] = signal.signal(number, self.handle)
        if not self.stacks and signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN) and self.open():
            # unbuffered and for appending: the reader may empty the file between two requests
            self.stacks = Path(self.folder, f"stacks_{os.getpid()}").open("ab", 0)  # noqa: SIM115
            faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=True)

    def handle(self, number: int, frame: object) -> None:
        self.signalled = signal.Signals(number).name
        earlier = self.handlers.get(number)
        # Python's own for SIGINT would raise KeyboardInterrupt
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def open(self) -> bool:
        if self.pipe is None and self.folder and not self.muted:
            try:
                self.pipe = os.open(f"{self.folder}/events", os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                self.warn(f"can't report to hpctrain: {error}")
                self.folder = ""
        return self.pipe is not None

    def write(self, event: str, wait_s: float = WAIT_S, **fields: Any) -> None:
        if not self.open():
            return
        rank = int(os.environ.get("RANK") or ((dist := _distributed()) and dist.get_rank()) or 0)
        record = {"event": event, "rank": rank, "pid": os.getpid(), **fields, "time": time.time()}
        line = json.dumps(record).encode() + b"\n"
        if len(line) > MAX_LINE:
            metrics = list((fields.pop("metrics", None) or {}).items())
            if len(metrics) < 2:
                self.warn(f"a report has {len(line)} bytes, more than {MAX_LINE}, and is skipped: {line[:80]!r}")
                return
            for part in metrics[: len(metrics) // 2], metrics[len(metrics) // 2 :]:
                self.write(event, wait_s, **fields, metrics=dict(part))
            return
        # a reader that hangs costs the program one wait
        until = time.monotonic() + (0.0 if self.stalled else wait_s)
        while self.pipe is not None:
            try:
                os.write(self.pipe, line)
                self.stalled = False
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    self.stalled = self.stalled or wait_s > 0
                    return
                time.sleep(0.005)
            except OSError:  # the reader has gone
                os.close(self.pipe)
                self.pipe, self.folder = None, ""

    def numbers(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in metrics.items():
            try:
                number = float(value.item() if hasattr(value, "item") else value)
                found[str(name)] = number if math.isfinite(number) else str(number)
            except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
                self.warn(f"the metric {name!r} isn't a number, and is skipped: {error}")
        return found

    def warn(self, problem: str) -> None:
        # a report mustn't end a training
        if not self.warned:
            print(f"hpctrain.session: {problem}", file=sys.stderr)  # noqa: T201
        self.warned = True

    def flush(self) -> None:
        if self.newest is not None:
            step, self.newest = self.newest, None
            self.write("step", 0.0, step=step)

    def cause(self) -> str:
        asked = self.folder and os.access(f"{self.folder}/stop", os.F_OK)
        near = self.deadline - time.time() <= self.margin_s
        return self.signalled or ("stop" if asked else "deadline" if near else "")


class _Agreement:
    # The maximum over all ranks. A call begins an all-reduce and the next one reads it, so that ranks needn't wait.
    # If steps are long, they read it at once; if they are very short, they begin it in every n-th call.
    def __init__(self, dist: Any) -> None:
        self.dist = dist
        self.world = dist.group.WORLD
        self.group = dist.new_group(backend="gloo")
        # gloo's threads need the GIL to free what Python no longer holds, and destroy_process_group may hold it while
        # it waits for them (torch 2.13): the last ones are kept, so that a pending collective does no harm
        self.kept: list[Any] = []
        self.pending: Any = None
        self.calls = self.due = self.begun = 0
        self.begun_at = -math.inf
        self.at_once = True

    def decide(self, stop: bool) -> bool:
        self.calls += 1
        if self.pending is not None and self.read():
            return True
        if self.calls < self.due:
            return False
        now = time.monotonic()
        step_s = min((now - self.begun_at) / (self.calls - self.begun), LONG_STEP_S)
        self.begun, self.begun_at = self.calls, now
        flags = sys.modules["torch"].tensor([int(stop), int(step_s * 1e6)], device="cpu")
        work = self.dist.all_reduce(flags, op=self.dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.pending = (work, flags)
        self.kept = [*self.kept[-7:], self.pending]
        return self.at_once and self.read()

    def read(self) -> bool:
        (work, flags), self.pending = self.pending, None
        work.wait()
        stop, step_us = flags.tolist()
        self.at_once = step_us >= LONG_STEP_S * 1e6
        self.due = self.begun + max(1, min(int(AGREE_EVERY_S * 1e6 / max(step_us, 1)), MAX_CALLS))
        return bool(stop)


def start(*, total_steps: int | None = None) -> None:
    """Report the start and, in the main thread, handle the stop signal; its earlier handler is called as well."""
    now = _session
    now.muted = False
    with contextlib.suppress(ValueError):  # in another thread than the main one
        now.install()
    if not now.started or total_steps is not None:
        now.started = True
        now.write("start", total_steps=total_steps, stacks=now.stacks is not None)


def step(n: int, metrics: Mapping[str, Any] | None = None) -> None:
    """Report ``n`` completed optimizer steps, over all attempts, and metrics by name; rank zero's are recorded."""
    now = _session
    if not now.folder or now.muted:
        return
    now.newest = operator.index(n)
    if metrics:
        now.write("step", METRICS_WAIT_S, step=now.newest, metrics=now.numbers(metrics))
        now.newest = None
    elif time.monotonic() - now.reported_at >= STEP_EVERY_S:
        now.reported_at = time.monotonic()
        now.flush()


def should_stop() -> bool:
    """Whether to save and leave: a signal or hpctrain asked for it, or the deadline is near. It stays true.

    Collective once torch.distributed is initialised: all ranks call it equally often, and get the same answer, which
    may be that of an earlier call. Raises RuntimeError if another rank is lost.
    """
    now = _session
    if now.muted or now.agreed:
        return now.agreed
    if not now.started:
        start()
    cause, dist = now.cause(), _distributed()
    stop = bool(cause)
    if dist is not None and dist.get_world_size() > 1:
        if now.agreement is None or now.agreement.world is not dist.group.WORLD:
            now.agreement = _Agreement(dist)
        stop = now.agreed = now.agreement.decide(stop)
    if stop and not now.stopping:
        now.stopping = True
        now.flush()
        now.write("stopping", cause=cause or "another rank")
    return stop


def seconds_left() -> float | None:
    """Seconds until this process is killed; None if that isn't known."""
    deadline = _session.deadline
    with contextlib.suppress(OSError, ValueError):
        deadline = json.loads(Path(_session.folder or os.devnull, "stop").read_text()).get("deadline") or deadline
    return None if math.isinf(deadline) else max(0.0, deadline - time.time())


def saved(step: int, path: str | os.PathLike[str]) -> None:
    """Report a save, complete on disk, from which the run can resume; those of rank zero are recorded."""
    _session.flush()
    _session.write("saved", step=operator.index(step), path=os.path.abspath(path))  # noqa: PTH100 - keeps links


def done() -> None:
    """Report that the run is complete. Without it, an end after a stop is an interruption, whatever the exit code."""
    _session.flush()
    _session.write("done")


def run_dir() -> Path | None:
    """Return the run directory; None outside of a run of hpctrain."""
    return Path(found) if (found := os.environ.get("HPCTRAIN_RUN_DIR")) else None


def checkpoint_dir(default: str | os.PathLike[str] = "checkpoints") -> Path:
    """Return the run's folder for saves, ``default`` outside of a run; it is made if it is missing."""
    folder = Path(os.environ.get("HPCTRAIN_CHECKPOINT_DIR") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def attempt() -> int:
    """Return the number of this attempt, counted from 1."""
    return int(os.environ.get("HPCTRAIN_ATTEMPT") or 1)


def last_save() -> Save | None:
    """Return the newest reported save that still exists; None without one, as in the first attempt."""
    folder = run_dir()
    if folder is None or not (folder / "saves.jsonl").exists():
        return None
    for line in reversed((folder / "saves.jsonl").read_text(errors="replace").splitlines()):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a crash left it incomplete, or someone edited it
            record = json.loads(line)
            found = Save(operator.index(record["step"]), folder / record["path"])
            if os.path.exists(found.path):  # noqa: PTH110 - never raises
                return found
    return None


def _distributed() -> Any:
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _forked() -> None:
    # a DataLoader's worker reports nothing, and has to die of SIGTERM
    global _session  # noqa: PLW0603
    earlier = _session
    if earlier.started or earlier.pipe is not None:
        _session = _Session(earlier)
        for number, handler in earlier.handlers.items():
            if signal.getsignal(number) == earlier.handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if earlier.stacks:
            faulthandler.unregister(signal.SIGUSR1)
        if earlier.pipe is not None:
            os.close(earlier.pipe)


def _exit() -> None:
    _session.flush()
    if _session.pipe is not None:
        _session.write("exit", 0.0)


_session = _Session()
atexit.register(_exit)
os.register_at_fork(after_in_child=_forked)
