"""Report to hpctrain from any program, and learn when to stop.

Standard library only: import it from hpctrain, or copy this file into a project. Outside of a run of hpctrain, every
function works and reports nothing. A report never ends the training: if something is wrong with it, a warning on
standard error says so, once for each kind of problem. Example; all ranks call `should_stop` after each step:

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
import functools
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, TypeVar, cast  # noqa: UP035 - Python 3.9

STEP_EVERY_S = 0.05  # between reports of steps that have no metrics
DEADLINE_MARGIN_S = 30.0  # before the deadline; or a tenth of the program's time, if that is less
WAIT_S, METRICS_WAIT_S = 5.0, 1.0  # while the pipe is full; a step without metrics doesn't wait
MAX_LINE = 4096  # bytes; Linux may tear longer ones (PIPE_BUF)
MAX_SHOWN = 200  # characters of a value in a warning
MAX_STEP = 2**53  # not every reader of JSON keeps larger numbers exact
AGREE_EVERY_S, MAX_CALLS, LONG_STEP_S = 0.02, 16, 0.5

F = TypeVar("F", bound=Callable[..., Any])


class Save(NamedTuple):
    """A reported save: the number of completed optimizer steps, and the file or folder."""

    step: int
    path: Path


class _Session:
    def __init__(self, forked_from: _Session | None = None) -> None:
        self.forked_from = forked_from  # kept: to end its groups would wait for threads that this process doesn't have
        self.muted = forked_from is not None
        self.folder = os.environ.get("HPCTRAIN_SESSION", "")
        self.warned: set[str] = set() if forked_from is None else forked_from.warned
        self.deadline = self.variable("HPCTRAIN_DEADLINE", math.inf, float, "a time in seconds")
        self.margin_s = min(DEADLINE_MARGIN_S, (self.deadline - time.time()) / 10)
        self.started = self.stopping = self.agreed = self.stalled = self.divided = False
        self.handlers: dict[int, Any] = {}
        self.stacks: Any = None
        self.pipe: int | None = None
        self.newest: int | None = None
        self.reported_at = -math.inf
        self.signalled = ""
        self.agreement: _Agreement | None = None

    def install(self) -> None:
        number = self.variable("HPCTRAIN_STOP_SIGNAL", signal.SIGTERM, _signal, "a signal such as TERM")
        for stop_signal in dict.fromkeys((signal.SIGTERM, number)):
            if stop_signal not in self.handlers:
                self.handlers[stop_signal] = signal.signal(stop_signal, self.handle)
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
                self.warn("open", f"can't report to hpctrain: {error}")
                self.folder = ""
        return self.pipe is not None

    def write(self, event: str, wait_s: float = WAIT_S, **fields: Any) -> None:
        if not self.open():
            return
        dist = _distributed()
        rank = self.variable("RANK", 0 if dist is None else dist.get_rank(), _whole_number_in, "a rank's number")
        record = {"event": event, "rank": rank, "pid": os.getpid(), **fields, "time": time.time()}
        line = json.dumps(record).encode() + b"\n"
        if len(line) > MAX_LINE:
            metrics = list((fields.pop("metrics", None) or {}).items())
            if len(metrics) < 2:
                problem = f"a report has {len(line)} bytes, more than {MAX_LINE}, and is skipped: {line[:80]!r}"
                self.warn("line", problem)
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
            except OSError:  # the reader has gone, or the program has closed the pipe
                with contextlib.suppress(OSError):
                    os.close(self.pipe)
                self.pipe, self.folder = None, ""

    def numbers(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        try:
            items = list(metrics.items())
        except Exception:
            self.warn("metrics", f"expected the metrics as numbers by name, got {_brief(metrics)}: they are skipped")
            return values
        for name, value in items:
            try:
                number = float(value.item() if hasattr(value, "item") else value)
                values[str(name)] = number if math.isfinite(number) else str(number)
            except Exception as error:  # an `item` of the user's may raise anything
                self.warn("metric", f"the metric {_brief(name)} isn't a number, and is skipped: {_brief(error, str)}")
        return values

    def variable(self, name: str, default: Any, convert: Callable[[str], Any], expected: str) -> Any:
        text = os.environ.get(name)
        with contextlib.suppress(ValueError, OverflowError, KeyError):
            return convert(text) if text else default
        self.warn(name, f"expected the variable {name} to be {expected}, got {_brief(text)}: it is ignored")
        return default

    def warn(self, kind: str, problem: str) -> None:
        if kind not in self.warned and sys.stderr is not None:
            with contextlib.suppress(Exception):  # standard error may be closed, or on a full disk
                print(f"hpctrain.session: {problem}", file=sys.stderr, flush=True)  # noqa: T201
        self.warned.add(kind)

    def flush(self) -> None:
        if self.newest is not None:
            step, self.newest = self.newest, None
            self.write("step", 0.0, step=step)

    def cause(self) -> str:
        has_stop_file = self.folder and os.access(f"{self.folder}/stop", os.F_OK)
        near = self.deadline - time.time() <= self.margin_s
        return self.signalled or ("stop" if has_stop_file else "deadline" if near else "")


class _Agreement:
    # The maximum over all ranks. A call begins an all-reduce and the next one reads it, so that ranks needn't wait.
    # If steps are long, they read it at once; if they are very short, they begin it in every n-th call.
    def __init__(self, dist: Any) -> None:
        self.dist = dist
        self.world = dist.group.WORLD
        self.group = dist.new_group(backend="gloo")
        # gloo's threads need the GIL to free what Python no longer holds, and destroy_process_group may hold it while
        # it waits for them (torch 2.13): the last ones are kept, so that a pending collective does no harm
        self.recent: list[Any] = []
        self.pending: Any = None
        self.calls = self.next_call = self.begun = 0
        self.begun_at = -math.inf
        self.at_once = True

    def decide(self, stop: bool) -> bool:
        self.calls += 1
        if self.pending is not None and self.read():
            return True
        if self.calls < self.next_call:
            return False
        now = time.monotonic()
        step_s = min((now - self.begun_at) / (self.calls - self.begun), LONG_STEP_S)
        self.begun, self.begun_at = self.calls, now
        flags = sys.modules["torch"].tensor([int(stop), int(step_s * 1e6)], device="cpu")
        # read at a later call, so that no rank waits for another one's device
        work = self.dist.all_reduce(flags, op=self.dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.pending = (work, flags)
        self.recent = [*self.recent[-7:], self.pending]
        return self.at_once and self.read()

    def read(self) -> bool:
        (work, flags), self.pending = self.pending, None
        work.wait()
        stop, step_us = flags.tolist()
        self.at_once = step_us >= LONG_STEP_S * 1e6
        self.next_call = self.begun + max(1, min(int(AGREE_EVERY_S * 1e6 / max(step_us, 1)), MAX_CALLS))
        return bool(stop)


def _report(function: F) -> F:
    # whatever a report gets and meets, the training continues
    @functools.wraps(function)
    def report(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except Exception as error:
            name = function.__name__
            _session.warn(name, f"a call of {name}() is skipped: {_brief(error, str)}")

    return cast(F, report)


@_report
def start(*, total_steps: float | None = None) -> None:
    """Report the start and, in the main thread, handle the stop signal; its earlier handler is called as well."""
    now = _session
    now.muted = False
    try:
        now.install()
    except ValueError:  # in another thread than the main one
        pass
    except Exception as error:  # the start itself is still to be reported
        now.warn("install", f"can't handle signals: {_brief(error, str)}")
    if not now.started or total_steps is not None:
        now.started = True
        steps = None
        try:
            is_endless = total_steps is None or (isinstance(total_steps, float) and total_steps == math.inf)
            steps = None if is_endless else _whole_number(total_steps)
        except ValueError as error:
            now.warn("total_steps", f"total_steps is ignored: {error}")
        now.write("start", total_steps=steps, stacks=now.stacks is not None)


@_report
def step(n: float, metrics: Mapping[str, Any] | None = None) -> None:
    """Report ``n`` completed optimizer steps, over all attempts, and metrics by name; rank zero's are recorded."""
    now = _session
    if not now.folder or now.muted:
        return
    now.newest = _whole_number(n)
    if metrics is not None and (values := now.numbers(metrics)):
        now.write("step", METRICS_WAIT_S, step=now.newest, metrics=values)
        now.newest = None
    elif time.monotonic() - now.reported_at >= STEP_EVERY_S:
        now.reported_at = time.monotonic()
        now.flush()


def should_stop() -> bool:
    """Whether to save and leave: a signal or hpctrain asked for it, or the deadline is near. It stays true.

    Collective once torch.distributed is initialised: all ranks call it equally often, and get the same answer, which
    may be that of an earlier call. Raises RuntimeError if another rank is lost. Where the ranks can't agree, as without
    gloo, a warning says so, and the answer stays False.
    """
    now = _session
    if now.muted or now.agreed or now.divided:
        return now.agreed
    if not now.started:
        start()
    cause, dist = now.cause(), _distributed()
    stop = bool(cause)
    if dist is not None and dist.get_world_size() > 1:
        if now.agreement is None or now.agreement.world is not dist.group.WORLD:
            try:
                now.agreement = _Agreement(dist)
            except Exception as error:  # on all ranks alike, as far as torch can tell
                # ranks that stop after different steps would wait for each other until they are killed
                now.divided = True
                now.warn("agree", f"the ranks can't agree on a stop, so should_stop() stays False: {error}")
                return False
        stop = now.agreed = now.agreement.decide(stop)
    if stop and not now.stopping:
        now.stopping = True
        now.flush()
        now.write("stopping", cause=cause or "another rank")
    return stop


def seconds_left() -> float | None:
    """Seconds until this process is killed; None if that isn't known."""
    deadline = _session.deadline
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        stop = json.loads(Path(_session.folder or os.devnull, "stop").read_text())
        deadline = float(stop.get("deadline") or deadline)
    return max(0.0, deadline - time.time()) if math.isfinite(deadline) else None


@_report
def saved(step: float, path: str | bytes | os.PathLike[Any]) -> None:
    """Report a save, complete on disk, from which the run can resume; those of rank zero are recorded."""
    _session.flush()
    place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - keeps links
    _session.write("saved", step=_whole_number(step), path=place)


@_report
def done() -> None:
    """Report that the run is complete. Without it, an end after a stop is an interruption, whatever the exit code."""
    _session.flush()
    _session.write("done")


def run_dir() -> Path | None:
    """Return the run directory; None outside of a run of hpctrain."""
    return Path(folder) if (folder := os.environ.get("HPCTRAIN_RUN_DIR")) else None


def checkpoint_dir(default: str | os.PathLike[str] = "checkpoints") -> Path:
    """Return the run's folder for saves, ``default`` outside of a run; it is made if it is missing and can be made."""
    try:
        folder = Path(os.environ.get("HPCTRAIN_CHECKPOINT_DIR") or default)
    except TypeError:
        _session.warn("default", f"expected the path of a folder for saves, got {_brief(default)}: using checkpoints")
        folder = Path("checkpoints")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a save into it fails, and says why; until then, training goes on
        _session.warn("mkdir", f"the folder for saves can't be made: {error}")
    return folder


def attempt() -> int:
    """Return the number of this attempt, counted from 1."""
    number: int = _session.variable("HPCTRAIN_ATTEMPT", 1, _whole_number_in, "an attempt's number")
    return number


def last_save() -> Save | None:
    """Return the newest reported save that still exists; None without one, as in the first attempt.

    Raises OSError if the records of saves can't be read: with None, the program would begin from scratch.
    """
    folder = run_dir()
    if folder is None or not (folder / "saves.jsonl").is_file():
        return None
    for line in reversed((folder / "saves.jsonl").read_text(errors="replace").splitlines()):
        # a crash left it incomplete, or someone edited it
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            record = json.loads(line)
            save = Save(_whole_number(record["step"]), folder / record["path"])
            if os.path.exists(save.path):  # noqa: PTH110 - never raises
                return save
    return None


def _whole_number(value: Any) -> int:
    # 2.0, an integer of NumPy and a tensor with one element are whole numbers, too
    if type(value) is int and 0 <= value <= MAX_STEP:
        return value
    with contextlib.suppress(Exception):  # an `item` of the user's may raise anything
        number = value.item() if hasattr(value, "item") else value
        integer = int(number)
        if integer == number and 0 <= integer <= MAX_STEP:
            return integer
    raise ValueError(f"expected a whole number from 0 to 2**53, got {_brief(value)}")


def _whole_number_in(text: str) -> int:
    return _whole_number(int(text))


def _signal(name: str) -> signal.Signals:
    return signal.Signals["SIG" + name]


def _brief(value: Any, spell: Callable[[Any], str] = repr) -> str:
    try:
        text = " ".join(spell(value).split())
    except Exception:  # a `repr` of the user's may raise anything
        text = type(value).__name__
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _distributed() -> Any:
    dist = sys.modules.get("torch.distributed")
    with contextlib.suppress(AttributeError):  # torch is still being imported, or is another module of this name
        return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
    return None


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
            with contextlib.suppress(OSError):  # the program may have closed it
                os.close(earlier.pipe)


@_report
def _exit() -> None:
    _session.flush()
    if _session.pipe is not None:
        _session.write("exit", 0.0)


_session = _Session()
atexit.register(_exit)
os.register_at_fork(after_in_child=_forked)
