"""Files that others can write, mutated: each reader returns, or refuses them in one line, within bounds."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.data.tar_index import index_of
from hpctrain.doctor.examination import wait_for_records
from hpctrain.doctor.folder import DoctorFolder, read_job, read_options
from hpctrain.doctor.measurements import RankAnswers, compare_with_baseline, figures, measured_lines, read_measured
from hpctrain.doctor.nodes import node_findings
from hpctrain.doctor.rank_findings import rank_findings
from hpctrain.errors import ERROR_PREFIX, HpctrainError
from hpctrain.launch.prepare import prepare
from hpctrain.program.reports import ProgramEvent, ProgramProgress
from hpctrain.run.checkpoint_manifest import MANIFEST, encode_manifest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.journal import Journal, JournalEvent, SearchDecision
from hpctrain.search.search import Search
from hpctrain.status.run_details import attempts_table
from hpctrain.sync.sent_run import Rows, describe, describe_state, identify
from hpctrain.terminal import visible
from hpctrain.top.columns import COLUMNS, TableView
from hpctrain.top.run_screen import OpenRun
from hpctrain.top.watch import WatchedRun
from tests.unit.fakes import FakeSlurm
from tests.unit.written_records import ODD, WHOLE_FILES, write_records

IN_THE_GATE, AT_NIGHT = 100, 2000
FAMILIES = ("runs", "runs", "runs", "doctor", "reports", "tars")
"""Folders of the files; those of runs have most readers."""
LIMIT_S = 20
MEMORY_BYTES = 2**30
"""That a reader may take."""

# -- what is read

PROGRAM = """\
from hpctrain import session
session.start(total_steps=4)
for step in range(1, 5):
    session.step(step, {"loss": 1 / step})
    path = session.checkpoint_dir() / f"save_{step}"
    path.write_text("x")
    session.saved(step, path)
session.done()
"""
SHORT = ("trainer.max_steps=4", "trainer.eval_every_steps=2", "checkpoint.every_steps=2")
DRAWN = "optimizer.lr=tag(log,interval(1e-3,1e-1))"
COMMANDS = [
    ["name=one", "run_dir=runs/one", *SHORT],
    ["resume", "runs/one", "trainer.max_steps=6"],
    ["run", "name=prog", "run_dir=runs/prog", "--", sys.executable, "program.py"],
    ["-m", "name=grid", "run_dir=runs/grid", *SHORT, "optimizer.lr=0.1,0.2"],
    ["-m", "sweep=asha", "sweep.num_runs=3", "sweep.reduction_factor=2", "name=a", "run_dir=runs/asha", *SHORT, DRAWN],
    ["-m", "sweep=optuna", "sweep.num_runs=2", "name=o", "run_dir=runs/optuna", *SHORT, DRAWN],
]
EVENTS = [
    {"event": "start", "pid": 1, "total_steps": 4, "stacks": True},
    {"event": "step", "step": 1, "rank": 0, "metrics": {"loss": 0.5, "accuracy": "nan"}},
    {"event": "saved", "step": 1, "path": "/x"},
    {"event": "stopping", "cause": "preempted"},
    {"event": "done"},
    {"event": "exit", "pid": 1},
]
GPU = dict.fromkeys(
    ("index", "name", "driver", "ecc_errors", "temperature", "hardware_slowdown", "thermal_slowdown", "power_brake"),
    "0",
)
RANK = {
    "rank": 0,
    "node": "n1",
    "stage": "done",
    "own_address": "10.0.0.1",
    "interfaces": [{"name": "ib0", "address": "10.0.0.1", "mbit_per_s": 1000}],
    "devices": ["cuda:0"],
    "gpus": [GPU],
    "flops_per_s": 1e12,
    "write_bytes_per_s": 1e9,
    "met": True,
}
PAIR = {"first": "n1", "second": "n2", "latency_s": 2e-5, "best_latency_s": 1e-5, "bytes_per_s": 1e9, "first_sent": 9}
NODE = {"node": "n1", "clock_ahead_s": [0.0, 1.0], "folder": "shared", "python": "works", "versions": {"a": "1"}}
EXAMINATION = {
    "asked.json": {"typed": ["doctor", "nodes=2"], "directory": "/x", "site": "mine", "renew": False},
    "job.json": {
        "stage": "done",
        "nodes": ["n1", "n2"],
        "rank_nodes": ["n1", "n2"],
        "complaints": {"ranks": ["srun: no"]},
        "late": ["ranks"],
        "answers": {"n1": {**NODE, "ended": True}, "n2": {**NODE, "node": "n2", "ended": False, "begun": "python"}},
    },
    "measured.json": {
        "pairs": [PAIR],
        "reductions": [{"backend": "gloo", "bytes": 8, "seconds": 1e-3}],
        "checkpoint_bytes": 9,
    },
    "ranks/0.json": RANK,
    "ranks/1.json": {**RANK, "rank": 1, "node": "n2"},
    "../baseline.json": {"request": {"time": 1.0, "figures": {"gloo_all_reduce_s": 1e-4, "pair_bandwidth": 1e9}}},
}


def written(folder: Path) -> None:
    """Write records of each kind."""
    config = Composer().compose(["name=one"])
    for name in ("one", "grid/0", "asha/0"):
        config.run_dir = str(folder / "runs" / name)
        prepare(config, [])
        write_records(folder / "runs" / name)
    home = RunDirectory.at(folder / "runs" / "asha")
    (home.path / "search").mkdir()
    record = SweepRecord(
        kind="asha",
        space={"optimizer.lr": "interval(1e-3,1e-1)"},
        fixed=["name=a"],
        folder="/x",
        submitted=1.0,
        command=["python"],
        num_runs=3,
        min_steps=2,
        reduction_factor=2,
        earlier=[{"space": {"seed": "1"}, "num_runs": 1}],
    )
    record.write(home, 0o750)
    SweepRecord(**{name: getattr(record, name) for name in record.__slots__} | {"kind": "grid"}).write(
        RunDirectory.at(folder / "runs" / "grid"), 0o750
    )
    journal = Journal(home)
    journal.publish(SearchDecision(event=JournalEvent.BEGIN, run=0, task="12_0", time=1.0))
    journal.publish(
        SearchDecision(event=JournalEvent.END, run=0, step=2, value=0.5, metric="loss", mode="min", reason="paused")
    )


def trained(folder: Path) -> None:
    """Make a training that is resumed, a program, a grid and two searches."""
    (folder / "program.py").write_text(PROGRAM)
    for words in COMMANDS:
        subprocess.run([sys.executable, "-m", "hpctrain", *words], cwd=folder, check=True, capture_output=True)
    path = folder / "runs" / "optuna" / "sweep.json"
    # so that another run is drawn
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_runs": 3}))


def make_others(folder: Path) -> None:
    """Write an examination, a program's reports, and a tar file with its index."""
    for name, record in EXAMINATION.items():
        path = folder / "doctor" / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    (folder / "reports").mkdir()
    (folder / "reports" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars" / "a.tar", "w") as tar:
        for name in ("0.cls", "0.txt", "1.cls", "é.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    index_of(folder / "tars" / "a.tar")
    (folder / "copies").mkdir()


# -- mutants


def mutate(path: Path, chance: random.Random) -> None:
    """Change a file in one of many ways."""
    if chance.random() < 0.1:
        # `logs` prints all of a log, however long it is
        left_out = ("cut", "huge") if path.suffix == ".log" else ("cut",)
        kind = chance.choice([name for name in WHOLE_FILES if name not in left_out])
        path.unlink()
        WHOLE_FILES[kind](path)
        return
    ways = [flipped, cut, sliced, doubled]
    if path.suffix in (".json", ".jsonl", ".yaml"):
        ways += [changed_values] * 12
    path.write_bytes(chance.choice(ways)(path, path.read_bytes(), chance))


def flipped(path: Path, data: bytes, chance: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 20])):
        mutant[chance.randrange(len(mutant))] ^= 1 << chance.randrange(8)
    return bytes(mutant)


def cut(path: Path, data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def sliced(path: Path, data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data) + 1)
    return data[:begin] + data[begin + chance.choice([1, 10, 100]) :]


def doubled(path: Path, data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(chance.sample(lines, len(lines)) + lines)


def changed_values(path: Path, data: bytes, chance: random.Random) -> bytes:
    if path.suffix == ".yaml":
        return changed_yaml(data, chance)
    if path.suffix == ".json":
        record = changed(json.loads(data), chance)
        if path.name == MANIFEST and isinstance(record, dict) and record.pop("checksum", None) is not None:
            return encode_manifest(record)
        return json.dumps(record, indent=2).encode()
    lines = data.splitlines()
    place = chance.randrange(len(lines))
    lines[place] = json.dumps(changed(json.loads(lines[place]), chance)).encode()
    return b"\n".join([*lines, b""])


ODD_YAML = (
    "2026-01-31",
    "!!binary aGk=",
    "!!set {a, b}",
    "{? [1, 2] : 3}",
    "{1: 2}",
    "!!python/name:os.system",
    "1:30:00",
    ".nan",
    "0x" + "f" * 400,
    "&x [*x]",
    "*absent",
    "<<: 3",
    "{<<: {a: 1}}",
    "${oc.env:HOME}",
    "${name}",
    "???",
    '"\\0"',
)


def changed_yaml(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.4:
        lines = data.decode().splitlines()
        place = chance.choice([number for number, line in enumerate(lines) if ": " in line])
        lines[place] = f"{lines[place].partition(': ')[0]}: {chance.choice(ODD_YAML)}"
        return "\n".join(lines).encode()
    config = yaml.safe_load(data)
    for _ in range(chance.choice([1, 1, 3])):
        config = changed(config, chance)
    return str(yaml.dump(config, allow_unicode=True)).encode(errors="replace")


def changed(value: Any, chance: random.Random) -> Any:
    """A value of JSON with another one somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        way = chance.random()
        if way < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if way < 0.2:
            other = chance.choice(["", "a\0b", "\ud800", "\x1b[2J", "../x", "9" * 400, "x.y", "a=b", "_target_"])
            return {other if name == key else name: each for name, each in value.items()}
        return {**value, key: changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(ODD)


# -- readers


def type_in(*words: str) -> None:
    """Type a command: it ends, and if it refuses, with a line."""
    out, err = io.TextIOWrapper(io.BytesIO(), errors="replace"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
    assert code in (0, 1, 2, 3), (words, code, err.getvalue())
    assert code != 2 or err.getvalue().splitlines()[-1].startswith(ERROR_PREFIX), err.getvalue()


def watch(run: Path) -> None:
    """Look at a run as `top` does."""
    watched = WatchedRun(RunDirectory.at(run), run.name)
    watched.update(None)
    shown = TableView("train/loss", time.time())
    for column in COLUMNS:
        column.text(watched, shown)
        column.key(watched, shown)
    opened = OpenRun(watched)
    opened.update()
    assert all(line == visible(line) for line in opened.log)
    attempts_table(watched.status, time.time())


def send(run: Path) -> None:
    """Read what a service gets; an error of the file system is another one's to report."""
    directory = RunDirectory.at(run)
    with contextlib.suppress(OSError):
        describe(directory, "digest")
        describe_state(directory, "running")
        identify(directory)
        Rows(directory, 0).read()


def ask(home: Path) -> None:
    """Ask a search for its next run."""
    record = SweepRecord.read(RunDirectory.at(home))
    if record is not None and record.kind in ("asha", "optuna"):
        with contextlib.suppress(OSError):
            search = Search(RunDirectory.at(home), record)
            search.create()
            search.ask("me")


def examine(folder: Path) -> None:
    """Read the records of an examination, and what they mean."""
    found = DoctorFolder(folder)
    read_options(found)
    if (job := read_job(found)) is None:
        return
    answers = RankAnswers(
        job=job,
        records=wait_for_records(found, 2, late_s=-1),
        measured=read_measured(found),
        processes_per_node=1,
        gpus_per_node=1,
        interface=None,
    )
    list(node_findings(job, folder=folder, python="python", versions={"a": "1"}))
    list(rank_findings(answers))
    known = figures(answers)
    list(measured_lines(answers, known))
    compare_with_baseline(found.baseline, "request", known, renew=False)


def report_events(path: Path) -> None:
    """Take the reports of a program into account."""
    progress = ProgramProgress()
    with contextlib.suppress(OSError):
        for line in path.read_bytes().split(b"\n") if path.is_file() and path.stat().st_size < 2**20 else ():
            if (event := ProgramEvent.parse(line)) is not None:
                progress.add(event)


def index(path: Path) -> None:
    """Read a tar file by its index."""
    found = index_of(path)
    for sample in range(len(found)):
        assert found.key(sample) is not None
        assert all(0 <= offset <= offset + size <= path.stat().st_size for _, offset, size in found.files(sample))


def readers(path: Path, *, at_night: bool) -> list[Callable[[], object]]:
    """What reads a file; `resume` imports too much for the gate."""
    top, *parts = path.parts
    if top == "doctor":
        return [partial(examine, Path("doctor/1").absolute())]
    if top == "reports":
        return [partial(report_events, path)]
    if top == "tars":
        return [partial(index, Path("tars/a.tar").absolute())]
    home = Path(top, parts[0])
    is_sweep = (home / "0").is_dir()
    run = home / parts[1] if is_sweep and parts[1].isdecimal() else home
    of_a_sweep = [
        partial(ask, home),
        *(partial(type_in, *words, str(home)) for words in (["best"], ["best", "--json"])),
    ]
    if run == home and is_sweep:
        return [*of_a_sweep, partial(type_in, "report", str(home), "-o", "copies/page.html")]
    commands = (
        ["status"],
        ["status", "--json"],
        ["inspect"],
        ["logs"],
        ["report", "-o", "copies/page.html"],
        ["compare", "copies/other"],
    ) + ((["resume", "cluster=slurm", "cluster.dry_run=true"],) if at_night else ())
    own = [partial(type_in, *words, str(run)) for words in commands]
    return [*own, partial(watch, run), partial(send, run), *(of_a_sweep if is_sweep else ())]


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bound the time and the memory of what is read inside."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


class Seeds:
    """Files as they were made, to which a folder is restored after each mutant.

    Args:
        folder: with them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._content = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    @property
    def mutable(self) -> list[Path]:
        """The files that are mutated, relative to the folder."""
        suffixes = (".json", ".jsonl", ".yaml", ".log", ".tar", ".index")
        known = [path for path, content in self._content.items() if content and path.suffix in suffixes]
        inside = [path.relative_to(self.folder) for path in known]
        return [path for path in inside if path.parts[0] in FAMILIES and "tensorboard" not in path.parts]

    def restore(self, changed: Path) -> None:
        """Undo a mutant of a file, and what its readers wrote beside it."""
        home = self.folder.joinpath(*changed.parts[: 2 if changed.parts[0] == "runs" else 1])
        for path in home.rglob("*"):
            if path.is_symlink() or not path.is_dir():
                known = self._content.get(path)
                if path.is_symlink() or not path.is_file() or known is None or path.stat().st_size != len(known):
                    path.unlink()
        for path, content in self._content.items():
            if home in path.parents:
                if path.is_dir():
                    shutil.rmtree(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists() or path.read_bytes() != content:
                    path.write_bytes(content)


@pytest.fixture
def no_signals(monkeypatch):
    """A process id in a mutated record may be that of any process."""
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, _: kill(pid, 0))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("make", "count"),
    [(written, IN_THE_GATE), pytest.param(trained, AT_NIGHT, marks=pytest.mark.nightly)],
    ids=["gate", "night"],
)
@pytest.mark.usefixtures("no_signals")
def test_a_mutant_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], count: int
) -> None:
    make(tmp_path)
    make_others(tmp_path)
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "copies" / "other")
    monkeypatch.chdir(tmp_path)
    # without SLURM's commands in the gate: each costs a process
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv(
        "PATH", FakeSlurm(tmp_path / "bin").environ["PATH"] if make is trained else str(tmp_path / "bin")
    )
    seeds = Seeds(tmp_path)
    first = int(os.environ.get("HPCTRAIN_SOAK_SEED", "1")) * 10**6
    files = seeds.mutable
    for number in itertools.islice(itertools.count(first), count):
        chance = random.Random(number)
        family = chance.choice(FAMILIES)
        path = chance.choice([path for path in files if path.parts[0] == family])
        mutate(path, chance)
        known = readers(path, at_night=make is trained)
        for read in chance.sample(known, min(3 if make is trained else 1, len(known))):
            try:
                with bounded():
                    read()
            except HpctrainError:
                pass
            except Exception as error:
                raise AssertionError(f"mutant {number}, {path}, {read}: {type(error).__name__}: {error}") from error
        seeds.restore(path)
