"""The phases of tests/gpu/run: trials, tests and benchmarks of hpctrain on one GPU, each result written at once.

Only Python's standard library is imported here, so that a broken torch is a result like any other. A phase that can't
end in the time that is left is skipped. SIGTERM ends the commands, and the table of what is known is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = (REPOSITORY / "tests" / "gpu" / "programs", REPOSITORY / "tests" / "multiprocess" / "programs")
TINY_TESTS = ("test_measured.py", "test_numerics.py", "test_own_process.py", "test_refusals.py", "test_exact_resume.py")
"""With --tiny; all of tests/gpu would take a quarter of an hour on two cores."""
EXACT = [REPOSITORY / "tests" / "gpu" / name for name in ("test_exact_resume.py", "test_interrupted.py")]
CONTENDERS_DIR = REPOSITORY / "tests" / "benchmarks" / "contenders"
MAX_LOG_BYTES = 15_000_000
MAX_OUTPUT_BYTES = 60_000
"""Of one command: its last output."""
INTERRUPT_GRACE_S = 8.0
"""Seconds for tests that are interrupted to print what failed."""
CPU_TIME_FACTOR = 2
"""Phases may take so many times as long on a CPU, which may be busy with other things."""
FINISHED, FAILED, INTERRUPTED = 0, 1, 4


@dataclass(frozen=True, kw_only=True)
class Result:
    """A line of results.jsonl.

    Attributes:
        phase: to which it belongs.
        name: what was tried or measured.
        value: the figure, if there is one.
        unit: of the value.
        ok: whether it is as it should be; None if it was skipped, or is a figure without a bound.
        detail: what else is known.
        seconds: that it took.
    """

    phase: str
    name: str
    value: float | None = None
    unit: str = ""
    ok: bool | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """A row of the table."""
        status = {True: "ok", False: "FAILED", None: "-"}[self.ok]
        value = "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()
        row = f"{self.phase:<10} {self.name:<34} {status:<6} {value:>16} {self.seconds:>6.1f} s  {self.detail}"
        return row.rstrip()


class Results:
    """The results so far, in a folder; any thread may add one, until they are closed."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.all: list[Result] = []
        self.closed = False
        self._lock = threading.RLock()  # a signal's handler may interrupt a thread that has it
        self._table = out / "table.txt"
        self._lines = (out / "results.jsonl").open("w", encoding="utf-8")
        self._log = (out / "log.txt").open("wb")
        self._logged = 0

    def add(self, result: Result) -> None:
        with self._lock:
            if self.closed:
                return
            self.all.append(result)
            self._lines.write(json.dumps(asdict(result)) + "\n")
            self._lines.flush()
            print(result.line, flush=True)

    def log(self, title: str, output: bytes) -> None:
        """Keep the end of a command's output."""
        text = f"\n==== {title}\n".encode() + output[-MAX_OUTPUT_BYTES:]
        with self._lock:
            if self._logged + len(text) <= MAX_LOG_BYTES:
                self._logged += len(text)
                self._log.write(text)
                self._log.flush()

    def print_table(self) -> None:
        failed = [result for result in self.all if result.ok is False]
        skipped = [result for result in self.all if result.detail.startswith("skipped")]
        table = "\n".join(
            [
                "",
                *(result.line for result in self.all),
                f"{len(self.all)} results, {len(failed)} failed, {len(skipped)} skipped",
                *(f"FAILED {result.phase}: {result.name}" for result in failed),
                "",
            ]
        )
        print(table, flush=True)
        self._table.write_text(table, encoding="utf-8")


@dataclass(frozen=True)
class CommandResult:
    """A command that ended: its exit code, None if it was killed at its limit, and its output."""

    code: int | None
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


class Commands:
    """Runs commands, each in a process group and a folder of its own; any thread may."""

    def __init__(self, results: Results, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.environ = dict(environ)
        self.ends_at = float("inf")
        self._results = results
        self._groups: set[int] = set()

    @property
    def left_s(self) -> float:
        """Seconds until the phase ends."""
        return self.ends_at - time.monotonic()

    def run(
        self, title: str, words: Sequence[str | Path], *, folder: Path, interrupt_first: bool = False, **variables: str
    ) -> CommandResult:
        """Run a command until it ends, or the phase does.

        Args:
            title: for the log.
            words: of the command.
            folder: in which it runs.
            interrupt_first: whether SIGINT comes some seconds before SIGKILL.
            variables: of its environment.
        """
        begin = time.monotonic()
        output = folder / "output"
        with output.open("wb") as target:
            process = subprocess.Popen(
                list(map(str, words)),
                cwd=folder,
                env=self.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._groups.add(process.pid)
        code = None
        try:
            code = process.wait(max(self.left_s - (INTERRUPT_GRACE_S if interrupt_first else 0), 0.1))
        except subprocess.TimeoutExpired:
            if interrupt_first:
                _signal_group(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(INTERRUPT_GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        self._groups.discard(process.pid)
        written = output.read_bytes()
        self._results.log(f"{title}: exit code {code}: {' '.join(map(str, words))}", written)
        return CommandResult(code, written.decode(errors="replace"), time.monotonic() - begin)

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def kill(self) -> None:
        """Kill all commands."""
        for group in list(self._groups):
            _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@dataclass(frozen=True)
class Case:
    """A run that is tried: its commands, with the exit code of each, and what it must record.

    Attributes:
        words: of each command.
        codes: the exit code of each command.
        reason: of the last attempt.
        detail: is in the last attempt's detail; on a GPU alone.
        act: what the task does to itself (TRIAL_ACT).
        metric: of which the last value is the result's value.
        bound: which the metric must exceed.
    """

    words: Sequence[Sequence[str]]
    codes: Sequence[int] = (FINISHED,)
    reason: str = "completed"
    detail: str = ""
    act: str = ""
    metric: str = ""
    bound: float | None = None


QUIET = ("logger.tensorboard=false", "code.snapshot=none")
TEXT = ("task=text", "trainer.max_epochs=null", "trainer.max_steps=20", "schedule.warmup_steps=5")
SMALL = ("model.width=32", "model.num_layers=1", "model.num_heads=1", "trainer.global_batch_size=8")
"""With --tiny, of each case that trains a GPT."""
PICTURES = (
    "task=custom",
    "task._target_=tests.gpu.programs.gpu_tasks.Pictures",
    "trainer.global_batch_size=16",
    "trainer.max_steps=14",
    "trainer.max_epochs=null",
    "logger.every_steps=1",
    "checkpoint.every_steps=1",
)
MISLABELLED = (*PICTURES, "task._target_=tests.gpu.programs.gpu_tasks.Mislabelled", "+task.wrong=train")
TWO = ("cluster.processes_per_node=2", "parallel.backend=gloo")
PAUSED = (*TEXT, "precision=fp16", "trainer.eval_every_steps=10", "trainer.pause_at_step=10")
SMOKE = {
    "fp32 digits": Case([["trainer.max_epochs=4"]], metric="eval/accuracy", bound=0.9),
    "bf16 text": Case([[*TEXT, "precision=bf16"]], metric="throughput/samples_per_s", bound=0),
    "compiled text": Case([[*TEXT, "precision=bf16", "trainer.compile=true"]], metric="train/loss", bound=0),
    "fp16 paused and resumed": Case([PAUSED, PAUSED], (INTERRUPTED, FINISHED), metric="train/loss", bound=0),
    "label out of range": Case([MISLABELLED], (FAILED,), "failed", "device-side assert"),
    "two ranks over gloo": Case([["trainer.max_epochs=2", *TWO]], metric="eval/accuracy", bound=0.5),
    "out of memory": Case([PICTURES], (FAILED,), "failed", "out of GPU memory", act="0:3:exhaust"),
    "a spinning kernel": Case([[*PICTURES, "health.hang_timeout_s=6"]], (FAILED,), "hang", act="0:3:spin_600"),
}


@dataclass
class Session:
    """What the phases share."""

    results: Results
    commands: Commands
    device: str
    tiny: bool
    phase: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def add(self, name: str, ended: CommandResult | None = None, **fields: object) -> None:
        seconds = 0.0 if ended is None else ended.seconds
        self.results.add(Result(phase=self.phase, name=name, seconds=round(seconds, 1), **fields))  # type: ignore[arg-type]


def machine(session: Session) -> None:
    folder = session.commands.new_folder()
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit"
        ended = session.commands.run("nvidia-smi", ["nvidia-smi", query, "--format=csv,noheader"], folder=folder)
        session.add("nvidia-smi", ended, ok=ended.code == 0, detail=ended.last_line)
    words = [sys.executable, PROGRAMS[0] / "machine.py", session.device, folder, *(["--tiny"] if session.tiny else [])]
    ended = session.commands.run("machine", words, folder=folder)
    for record in _json_lines(ended.output):
        session.add(**record)
    session.add("measured", ended, ok=ended.code == 0, detail="" if ended.code == 0 else ended.last_line)


def smoke(session: Session) -> None:
    with ThreadPoolExecutor(len(SMOKE) if session.on_gpu else 2) as pool:
        for ended in [pool.submit(_try_case, session, name, case) for name, case in SMOKE.items()]:
            ended.result()


def _try_case(session: Session, name: str, case: Case) -> None:
    folder = session.commands.new_folder()
    run = folder / "R"
    command = [sys.executable, "-m", "hpctrain", f"run_dir={run}", *QUIET]
    if not session.on_gpu:
        command.append("cluster.gpus_per_node=0")
    begin = time.monotonic()
    problems, ended = [], None
    for words, code in zip(case.words, case.codes, strict=True):
        small = SMALL if session.tiny and "task=text" in words else ()
        ended = session.commands.run(
            name,
            [*command, *words, *small],
            folder=folder,
            OMP_NUM_THREADS="1",
            TRIAL_ACT=case.act,
            HPCTRAIN_GPU_TESTS_DEVICE=session.device,
        )
        if ended.code != code:
            problems.append(f"exit code {ended.code} instead of {code}: {ended.last_line}")
    attempts = _json_lines_of(run / "attempts.jsonl")
    last = attempts[-1] if attempts else {}
    reason, detail = last.get("reason"), str(last.get("detail", ""))
    if reason != case.reason:
        problems.append(f"{reason} instead of {case.reason}: {detail}")
    elif session.on_gpu and case.detail not in detail:
        problems.append(f"the detail lacks {case.detail!r}: {detail}")
    values = [record[case.metric] for record in _json_lines_of(run / "metrics.jsonl") if case.metric in record]
    if case.bound is not None and not (values and values[-1] > case.bound):
        problems.append(f"{case.metric} is not above {case.bound}: {values[-1:]}")
    session.add(
        name,
        CommandResult(None, "", time.monotonic() - begin),
        value=values[-1] if values else None,
        unit=case.metric.partition("/")[2],
        ok=not problems,
        detail="; ".join(problems)[:600] or f"{reason} {detail}"[:200],
    )


def _pytest(session: Session, name: str, selection: str, files: Sequence[Path]) -> None:
    if session.tiny:
        files = [file for file in files if file.name in TINY_TESTS]
        selection += " and not slow"
    folder = session.commands.new_folder()
    workers = "16" if session.on_gpu else "2"
    ended = session.commands.run(
        name,
        [
            *(sys.executable, "-m", "pytest", *files, "-m", selection, f"--rootdir={REPOSITORY}"),
            *(
                "-c",
                REPOSITORY / "pyproject.toml",
                "-v",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:benchmark",
                "--color=no",
                "--tb=short",
            ),
            *(f"--numprocesses={workers}", "--dist=loadgroup", "--no-loadscope-reorder"),
            *("--timeout=150", f"--basetemp={folder / 'tests'}"),
        ],
        folder=folder,
        interrupt_first=True,
        HPCTRAIN_GPU_TESTS_DEVICE=session.device,
        HPCTRAIN_GPU_TESTS_FAILURES=str(folder / "failures"),
    )
    outcomes = re.findall(r"^\[gw\d+\] \[ *\d+%\] (\w+) (.*?) *$", ended.output, re.MULTILINE)
    counts = Counter(outcome for outcome, _ in outcomes)
    complete = ended.code in (0, 1)
    detail = ", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items() if count)
    if ended.code is None:
        detail += "; the time was over before the last test"
    elif not complete:
        detail += f"; pytest's exit code is {ended.code}: {ended.last_line}"
    passed = complete and not counts["FAILED"] and not counts["ERROR"]
    session.add(name, ended, value=counts["PASSED"], unit="passed", ok=passed, detail=detail)
    for failure in _json_lines_of(folder / "failures"):
        test, text = failure["test"].partition("@")[0].rpartition("/")[2], failure["text"]
        session.results.log(test, text.encode())
        errors = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E  ")]
        session.add(test, ok=False, detail=" | ".join(errors)[:400])
    shutil.rmtree(folder, ignore_errors=True)


def core(session: Session) -> None:
    _pytest(session, "core tests", "core", _test_files())


def exactness(session: Session) -> None:
    _pytest(session, "exactness", "not core", EXACT)


def rest(session: Session) -> None:
    _pytest(session, "other tests", "not core", [file for file in _test_files() if file not in EXACT])


def _test_files() -> list[Path]:
    return sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py"))


CONTENDERS = {
    "by hand": "gpu_by_hand",
    "hpctrain": "gpu_with_hpctrain",
    "Lightning": "gpu_with_lightning",
    "Accelerate": "gpu_with_accelerate",
}


def gpt2(session: Session) -> None:
    _compare(session, compiled=False)
    # compiling takes most of a minute: at the same time for all, before any of them is measured
    with ThreadPoolExecutor(len(CONTENDERS)) as pool:
        for program in _compiled_contenders(session).values():
            pool.submit(_run_contender, session, "compiling", program, "gpt2", steps=2, compiled=True)
    _compare(session, compiled=True)


def _compare(session: Session, *, compiled: bool) -> None:
    base = None
    for name, program in (_compiled_contenders(session) if compiled else CONTENDERS).items():
        found = _train(session, f"{name}{', compiled' * compiled}", program, "gpt2", compiled=compiled, base=base)
        base = found if base is None else base


def _compiled_contenders(session: Session) -> dict[str, str]:
    """The contenders that compile: on a CPU only some, since each takes many seconds of a core."""
    return {name: CONTENDERS[name] for name in ("by hand", "hpctrain")} if session.tiny else CONTENDERS


def models(session: Session) -> None:
    _train(session, "GPT-2 355M", "gpu_with_hpctrain", "gpt2-medium", expected=16)
    no_copy = "checkpoint.asynchronous=false"  # nothing is saved, so no page-locked memory is worth its time
    _train(session, "GPT-2 1.6B", "gpu_with_hpctrain", "gpt2-xl", expected=16, overrides=no_copy)
    pure = f"{no_copy} precision=bf16_pure"
    _train(session, "GPT-2 1.6B, bf16_pure", "gpu_with_hpctrain", "gpt2-xl", expected=8, overrides=pure)
    by_hand = _train(session, "ResNet-50, by hand", "gpu_by_hand", "resnet50")
    _train(session, "ResNet-50, hpctrain", "gpu_with_hpctrain", "resnet50", base=by_hand)


def _train(
    session: Session,
    title: str,
    program: str,
    model: str,
    *,
    compiled: bool = False,
    base: Mapping[str, float] | None = None,
    expected: int | None = None,
    overrides: str = "",
) -> dict[str, float] | None:
    """Train with a contender of tests/benchmarks/gpu.py; return its readings.

    Args:
        session: to which the result is added.
        title: of the result.
        program: the contender.
        model: as tests/benchmarks/gpu.py names it.
        compiled: whether with torch.compile.
        base: readings with which these are compared.
        expected: bytes per parameter of weights, gradients and optimizer.
        overrides: for hpctrain.
    """
    steps = 6 if session.tiny else {"gpt2": 80, "resnet50": 60}.get(model, 24)
    ended, found = _run_contender(session, title, program, model, steps=steps, compiled=compiled, overrides=overrides)
    if found is None:
        missing = re.search(r"No module named '(lightning|accelerate)'", ended.output)
        reason = f"skipped: {missing[1]} is not installed" if missing else f"exit code {ended.code}: {ended.last_line}"
        session.add(title, ended, ok=None if missing else False, detail=reason)
        return None
    unit = "images/s" if model.startswith("resnet") else "tokens/s"
    facts = [f"{found['step_ms']:.2f} ms a step", f"peak {found['peak_gb']:.2f} GB"]
    ok = True
    if found["mfu"] is not None:
        facts.insert(0, f"MFU {found['mfu']:.1%}")
        ok = 0 < found["mfu"] < 1
    if base is not None:
        facts.insert(0, f"{found['step_ms'] / base['step_ms']:.3f} x the step by hand")
    facts.append(f"first step {found['first_step_s']:.1f} s")
    if expected is not None and session.on_gpu:
        measured = found["bytes_per_parameter"]
        facts.append(f"{measured:.2f} bytes per parameter, {expected} in the docs")
        ok = ok and abs(measured / expected - 1) < 0.1
    session.add(title, ended, value=found["per_s"], unit=unit, ok=ok, detail=", ".join(facts))
    return found


def _run_contender(
    session: Session, title: str, program: str, model: str, *, steps: int, compiled: bool, overrides: str = ""
) -> tuple[CommandResult, dict[str, float] | None]:
    """Train without saves, which have a phase of their own; return the readings, None if there are none."""
    folder = session.commands.new_folder()
    report = folder / "report.json"
    ended = session.commands.run(
        title,
        [sys.executable, CONTENDERS_DIR / f"{program}.py"],
        folder=folder,
        MODEL=model,
        TINY=str(int(session.tiny)),
        COMPILED=str(int(compiled)),
        DEVICE=session.device,
        STEPS=str(steps),
        BLOCK=str(steps),
        REPORT=str(report),
        OVERRIDES=overrides,
    )
    found = json.loads(report.read_text()) if report.is_file() else None
    shutil.rmtree(folder, ignore_errors=True)
    return ended, found


def saves(session: Session) -> None:
    for model in ("gpt2", "gpt2-medium"):
        folder = session.commands.new_folder()
        toy = ["--tiny"] if session.tiny else []
        words = ["--model", model, "--device", session.device, "--folder", folder, "--json", *toy]
        program = REPOSITORY / "tests" / "benchmarks" / "gpu_saves.py"
        ended = session.commands.run(f"saves of {model}", [sys.executable, program, *words], folder=folder)
        shutil.rmtree(folder, ignore_errors=True)
        found = next(iter(_json_lines(ended.output)), None)
        if found is None:
            session.add(f"saves of {model}", ended, ok=False, detail=f"exit code {ended.code}: {ended.last_line}")
            continue
        writing = found["step_writing_ms"]
        facts = (
            f"stalls {', '.join(f'{stall:.3f}' for stall in found['stalls_s'])} s, copy {found['copy_s']:.3f} s, "
            f"torch.save {found['torch_save_s']:.2f} s, written in {found['written_s'][-1]:.1f} s, step "
            f"{found['step_ms']:.1f} ms, while writing {'-' if writing is None else f'{writing:.1f} ms'}, "
            f"{found['pinned']} of {found['tensors']} tensors page-locked in {found['locked_s']:.1f} s, memory "
            f"{found['memory_x']:.2f} x {found['gb']:.2f} GB"
        )
        session.add(f"saves of {model}", ended, value=found["stall_x"], unit="x a copy", ok=True, detail=facts)


@dataclass(frozen=True)
class Phase:
    """A phase, and the most seconds that it may take."""

    run: Callable[[Session], None]
    limit_s: float


PHASES = {
    "machine": Phase(machine, 15),
    "smoke": Phase(smoke, 50),
    "core": Phase(core, 105),
    "gpt2": Phase(gpt2, 220),
    "saves": Phase(saves, 60),
    "exactness": Phase(exactness, 140),
    "models": Phase(models, 80),
    "rest": Phase(rest, 140),
}
"""In the order in which they run."""


def run_phases(session: Session, names: Sequence[str], ends_at: float) -> None:
    """Run phases in turn; one may take longer than its limit where the later ones keep theirs."""
    limits = {name: PHASES[name].limit_s * (1 if session.on_gpu else CPU_TIME_FACTOR) for name in names}
    for place, name in enumerate(names):
        begin = time.monotonic()
        left_s = max(ends_at - begin, 0)
        session.phase = name
        if limits[name] > left_s:
            session.add(name, detail=f"skipped: it may take {limits[name]:.0f} s, and {left_s:.0f} s are left")
            continue
        later_s = sum(limits[later] for later in names[place + 1 :])
        session.commands.ends_at = begin + max(limits[name], left_s - later_s)
        try:
            PHASES[name].run(session)
        except Exception as error:  # the next phases may still show something
            session.add(name, ok=False, detail=f"{type(error).__name__}: {error}")
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)


@contextlib.contextmanager
def _driver_kept_loaded(session: Session, folder: Path):  # type: ignore[no-untyped-def]  # a context manager
    """Keep the driver from unloading what each process would wait for again: a process holds a context meanwhile."""
    if not session.on_gpu:
        yield
        return
    program = "import torch, time; torch.zeros(1, device='cuda'); time.sleep(3600)"
    holder = subprocess.Popen([sys.executable, "-c", program], cwd=folder, env=session.commands.environ)
    try:
        yield
    finally:
        holder.kill()
        holder.wait()


def _json_lines(text: str) -> list[dict]:  # type: ignore[type-arg]  # of any records
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _json_lines_of(file: Path) -> list[dict]:  # type: ignore[type-arg]  # of any records
    return _json_lines(file.read_text()) if file.is_file() else []


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="bash tests/gpu/run OUT [--device cuda|cpu] [--minutes 13.5] [--only PHASE,...] [--tiny]",
        description="Run trials, tests and benchmarks of hpctrain on one GPU; each result is written at once.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for results.jsonl, table.txt and log.txt")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a rehearsal without a GPU")
    parser.add_argument(
        "--minutes", type=float, default=13.5, help="a phase that may not end in the time left is skipped (%(default)s)"
    )
    parser.add_argument("--only", default=",".join(PHASES), help="phases, in this order: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small models, and fewer tests")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in PHASES]:
        parser.error(f"--only: there is no phase {unknown[0]}; the phases are {', '.join(PHASES)}")
    ends_at = time.monotonic() + 60 * options.minutes
    results = Results(options.out.absolute())
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(results, Path(folder), os.environ)
        session = Session(results, commands, options.device, options.tiny)

        def stop(number: int, _: object) -> None:
            session.add(session.phase, ok=False, detail=f"ended by {signal.Signals(number).name}")
            results.closed = True  # what is killed now is no result
            commands.kill()
            results.print_table()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(128 + number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        with _driver_kept_loaded(session, Path(folder)):
            run_phases(session, names, ends_at)
    results.print_table()
    return FAILED if any(result.ok is False for result in results.all) else FINISHED


if __name__ == "__main__":
    sys.exit(main())
