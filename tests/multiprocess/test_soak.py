"""Signals at random points of runs: every attempt ends, and the last one ends where an uninterrupted run does.

Points, ranks and signals are drawn at random. A failure names its seed; HPCTRAIN_SOAK_SEED=SEED draws the same points
again, though the signals won't come in the same microsecond.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import secrets
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.drill.comparison import compare, read_result
from hpctrain.errors import ExitCode
from hpctrain.launch.local import free_port, rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from tests.multiprocess.programs.signalled import PHASES, SENT

SEED = int(os.environ.get("HPCTRAIN_SOAK_SEED") or secrets.randbelow(10**6))
STEPS, SAVE_EVERY, EVALUATE_EVERY = 80, 15, 25
STEP_S = 0.015
BOUND_S = 100.0
GRACE_S, STOPPING_S = 4.0, 30.0
"""How long ranks get to end by themselves once one of them has failed, or has stopped, as a launcher gives it to them.

Less than a hang takes here: a rank that a second Ctrl-C ended during the rendezvous leaves the others waiting.
"""
PER_RUN = 6
WORLD_SIZES = (1, 2, 3)
TRAINING = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.trial.Trial",
        "+task.dropout=0.3",
        "+task.batchnorm=true",
        "+task.noise=true",
    ),
    *("+task.num_samples=56", "+task.eval_samples=30", "schedule=cosine", "optimizer.lr=0.01"),
    *("trainer.global_batch_size=12", f"trainer.max_steps={STEPS}", "trainer.max_epochs=null"),
    *(f"trainer.eval_every_steps={EVALUATE_EVERY}", f"checkpoint.every_steps={SAVE_EVERY}", "checkpoint.keep=3"),
    *("logger.tensorboard=false", "logger.samples=true", "logger.every_steps=7"),
    *("health.hang_timeout_s=40", "health.start_timeout_s=40", "health.eval_timeout_s=40", "health.save_timeout_s=40"),
)
"""A deadlock ends as a hang, with the stacks of all ranks, and so fails the test with an explanation."""

ENDING = ("last step", "after it")
LEAVING = (*ENDING, "the stop")
"""Phases in which a rank may be about to end, and has restored the signal handlers by the time a signal comes."""
GENTLE = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")


@dataclass
class SignalledAttempt:
    """One attempt, the signals that were planned and sent, and how it ended."""

    phase: str
    plan: dict
    launched: bool
    sent: list[dict] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    output: str = ""

    @property
    def in_order(self):
        """Whether nothing kept the ranks from stopping cleanly."""
        interrupts = Counter(one["rank"] for one in self.sent if one["signal"] == "SIGINT")
        killed = any(one["signal"] == "SIGKILL" or not one["handled"] for one in self.sent)
        # at its very end a rank restores the handlers that it still had when its status was read
        too_late = self.phase in LEAVING and any(code < 0 or code == 99 for code in self.codes)
        return not killed and not too_late and max(interrupts.values(), default=0) < 2

    def __str__(self):
        mode = "launched" if self.launched else "by hand"
        return f"{self.phase} ({mode}): {self.plan}\nsent: {self.sent}\nexit codes: {self.codes}\n{self.output}"


class InterruptedRun:
    """One run whose attempts get signals."""

    def __init__(self, fork_server, composer, folder, world_size, draw):
        self.fork_server = fork_server
        self.folder = folder
        self.world_size = world_size
        self.draw = draw
        words = (*TRAINING, f"data.num_workers={int(draw.random() < 0.3)}")
        folder.mkdir(parents=True)
        config = composer.compose([f"run_dir={folder / 'run'}", *words], world_size=world_size)
        self.directory = prepare(config, words).directory
        self.ledger = Ledger(self.directory)
        self.sessions = []
        self.history = []

    @property
    def saved_step(self):
        steps = self.directory.checkpoint_steps()
        return steps[-1] if steps else 0

    @property
    def completed(self):
        return any(attempt.reason is Reason.COMPLETED for attempt in self.ledger.attempts())

    def drawn(self, phase, folder):
        """A plan for signals in a phase."""
        draw = self.draw
        at, most = draw.choice(PHASES[phase])
        nth = draw.randint(1, most) if most else STEPS - self.saved_step
        ranks = list(range(self.world_size))
        receivers = draw.choice([[draw.choice(ranks)], [draw.choice(ranks)], ranks])
        signals = ["SIGKILL"] if draw.random() < 0.25 else draw.choices(GENTLE, k=draw.choice([1, 1, 1, 2, 3]))
        sender = 0 if phase in ("save", "after it", "the stop") else draw.choice(ranks)
        # the sender itself comes last, or it may die before the others get theirs
        receivers.sort(key=sender.__eq__)
        planned = [{"rank": rank, "signal": signal} for signal in signals for rank in receivers]
        if draw.random() < 0.5:
            for one in planned:
                one["after_s"] = draw.choice([0.0, 0.0005, 0.002, 0.01])
            planned[0]["after_s"] += 0.0005
        return {"folder": str(folder), "at": at, "nth": nth, "rank": sender, "signals": planned}

    def interrupt(self, phase):
        """Run an attempt with signals in this phase; returns whether it got there and they were sent."""
        folder = self.folder / f"attempt_{len(self.history)}"
        folder.mkdir()
        attempt = SignalledAttempt(phase, self.drawn(phase, folder), launched=self.draw.random() < 0.7)
        self.history.append(attempt)
        sooner = f"0:{self.draw.randint(1, 20)}:SIGTERM" if phase == "the stop" else ""
        self.run(attempt, sleep_s=0 if phase in ENDING else STEP_S, act=sooner)
        record = folder / SENT
        attempt.sent = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        self.check(attempt)
        return bool(attempt.sent)

    def finish(self):
        """Run an attempt without signals, which completes the run."""
        attempt = SignalledAttempt("none", {}, launched=True)
        self.history.append(attempt)
        self.run(attempt, sleep_s=0)
        self.check(attempt)
        assert attempt.codes == [0] * self.world_size, str(attempt)
        assert self.completed, str(attempt)

    def run(self, attempt, sleep_s, act=""):
        """Run the ranks of an attempt to their ends."""
        plan = json.dumps(attempt.plan) if attempt.plan else ""
        path = str(self.directory.path)
        common = {"TRIAL_SLEEP": str(sleep_s), "TRIAL_ACT": act}
        if self.world_size == 1:
            attempt.launched = True
            numbers = [self.fork_server.start("signalled:run", plan, "resume", path, folder=self.folder, **common)]
        else:
            claimed = self.claim() if attempt.launched else None
            common |= LauncherFacts(attempt=claimed).variables()
            port = free_port()
            places = [rank_variables(rank, self.world_size, port) for rank in range(self.world_size)]
            numbers = [self.fork_server.start("signalled:rank", plan, path, **place, **common) for place in places]
        try:
            self.wait(numbers)
        finally:
            done = self.fork_server.wait(*numbers)
            self.sessions += [one.pid for one in done]
            attempt.codes = [one.code for one in done]
            attempt.output = "\n".join(f"--- exit code {one.code}\n{one.output}" for one in done if one.output)
        if self.world_size > 1 and attempt.launched:
            outcome = Outcome.of_attempt(self.directory, claimed, self.world_size)
            record_end(self.directory, claimed, outcome, world_size=self.world_size)

    def claim(self):
        """Begin an attempt as a launcher does."""
        UnrecordedEnds(self.directory, Slurm({})).close(self.world_size)
        return self.ledger.claim(secret=self.world_size > 1)

    def wait(self, numbers):
        """Wait for the ranks as srun does: once one has failed, the others have a bounded time."""
        deadline = ended_by = time.monotonic() + BOUND_S
        while None in (codes := [self.fork_server.code(number) for number in numbers]):
            now = time.monotonic()
            if set(codes) != {None}:
                stopped = set(codes) <= {None, ExitCode.FINISHED, ExitCode.INTERRUPTED}
                ended_by = min(ended_by, now + (STOPPING_S if stopped else GRACE_S))
            if now > ended_by:
                for number, code in zip(numbers, codes, strict=True):
                    if code is None:
                        self.fork_server.kill(number)
                assert now <= deadline, f"no end within {BOUND_S:g} s; killed"
                return

    def check(self, attempt):
        """What must hold after each attempt."""
        attempts = self.ledger.attempts()
        # the next attempt closes one that died without an exit record
        numbers = list(range(1, self.ledger.last_claim() + 1))
        assert [one.attempt for one in attempts if not one.open] in (numbers, numbers[:-1]), f"{attempts}\n{attempt}"
        for info in list_checkpoints(self.directory):
            assert info.intact, f"{info}\n{attempt}"
        if 99 in attempt.codes and attempt.phase not in LEAVING:
            early = {one["rank"] for one in attempt.sent if one["signal"] == "SIGINT" and not one["handled"]}
            assert {rank for rank, code in enumerate(attempt.codes) if code == 99} <= early, str(attempt)
        if not attempts:
            return
        last = attempts[-1]
        allowed = {Reason.COMPLETED, Reason.INTERRUPTED}
        if attempt.in_order:
            assert len(set(attempt.codes)) == 1, str(attempt)
            # a launcher learns from the exit records that the ranks stopped
            told = self.world_size > 1 and attempt.launched
            assert attempt.codes[0] == (0 if told or last.reason is Reason.COMPLETED else 4), str(attempt)
            assert last.reason in allowed, str(attempt)
            assert self.saved_step == (STEPS if last.reason is Reason.COMPLETED else last.end_step), str(attempt)
        elif attempt.launched and self.world_size > 1:
            assert last.reason in allowed | {Reason.INFRASTRUCTURE}, str(attempt)
        else:
            # without a launcher nothing can record the end of a killed rank
            assert last.reason in allowed | {Reason.INFRASTRUCTURE, None}, str(attempt)
        for one, following in itertools.pairwise(attempts):
            if one.start_step is not None and following.start_step is not None:
                assert one.start_step <= following.start_step, str(attempt)

    def leftovers(self):
        """Processes of the attempts' sessions that still run."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
                command = (entry.parent / "cmdline").read_bytes()
            except OSError:
                continue
            # pids are reused: another session may have one of theirs
            ours = b"multiprocessing.forkserver" in command or str(self.folder).encode() in command
            if ours and int(session) in self.sessions and state not in "ZX":
                found[entry.parent.name] = command
        return found


@pytest.fixture
def straight(fork_server, composer, tmp_path):
    """Trains without interruptions, with so many ranks; returns what the run leaves."""

    def train(world_size):
        run = InterruptedRun(fork_server, composer, tmp_path / f"straight_{world_size}", world_size, random.Random(0))
        run.finish()
        return read_result(run.directory)

    return train


def interrupt_until_completed(run, expected, limit):
    """Interrupt one run in several phases until it is completed; returns the attempts that got signals."""
    # a run is often completed after signals at its end, so these phases come last
    phases = sorted(run.draw.sample(list(PHASES), PER_RUN), key=ENDING.__contains__)
    interrupted = 0
    while not run.completed and interrupted < limit:
        interrupted += run.interrupt(phases[interrupted % len(phases)])
    if not run.completed:
        run.finish()
    differing = [row for row in compare(expected, read_result(run.directory)) if not row.equal]
    assert not differing, "\n\n".join(map(str, [*differing, *run.history]))
    deadline = time.monotonic() + 15
    while left := run.leftovers():
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)
    return [attempt for attempt in run.history if attempt.sent]


@pytest.mark.parametrize("place", sorted({name for places in PHASES.values() for name, _ in places}))
def test_every_place_where_signals_are_sent_exists(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)


@pytest.mark.parametrize(
    "interruptions",
    [
        2,
        pytest.param(30, marks=pytest.mark.nightly),
        pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_a_run_with_signals_anywhere_ends_as_a_straight_one(fork_server, composer, straight, tmp_path, interruptions):
    def interrupt_runs(world_size):
        """Interrupt runs of one size, one after the other."""
        count, done = interruptions // len(WORLD_SIZES) + (world_size <= interruptions % len(WORLD_SIZES)), []
        numbers = itertools.count()
        expected = straight(world_size) if count else None
        while len(done) < count:
            name = f"run_{world_size}_{next(numbers)}"
            run = InterruptedRun(fork_server, composer, tmp_path / name, world_size, random.Random(f"{SEED} {name}"))
            try:
                done += interrupt_until_completed(run, expected, min(count - len(done), PER_RUN))
            except BaseException as error:
                error.add_note(f"HPCTRAIN_SOAK_SEED={SEED}: {run.directory.path}")
                raise
        return done

    with ThreadPoolExecutor(len(WORLD_SIZES)) as pool:
        interrupted = [one for done in pool.map(interrupt_runs, WORLD_SIZES) for one in done]
    assert len(interrupted) == interruptions
    phases = Counter(one.phase for one in interrupted)
    assert interruptions < 200 or phases.keys() == PHASES.keys(), phases
    print(f"HPCTRAIN_SOAK_SEED={SEED}: {len(interrupted)} interruptions: {dict(phases)}")


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_an_attempt_that_died_without_an_exit_record_is_closed_by_the_next(train, world_size):
    act = ",".join(f"{rank}:{STEPS // 2}:SIGKILL" for rank in range(world_size))
    words = (*TRAINING, "checkpoint.asynchronous=false")
    code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=act)
    assert code == -9, output
    assert run.attempts == [(0, "None", None)], output
    code, run, output = train("run", *words, world_size=world_size)
    assert code == 0, output
    saved = STEPS // 2 // SAVE_EVERY * SAVE_EVERY
    ((_, reason, ended), last) = run.attempts
    assert (reason, last) == ("infrastructure", (saved, "completed", STEPS))
    assert saved <= ended < STEPS // 2
    assert "ended without a" in Ledger(run.directory).attempts()[0].detail


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_loading_processes_are_not_blamed_on_the_task(train, world_size):
    words = (*TRAINING, "data.num_workers=1")
    code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=f"0:{STEPS // 2}:kill_workers")
    assert (code, [reason for _, reason, _ in run.attempts]) == (1, ["infrastructure"]), output
    assert "DataLoader worker" in Ledger(run.directory).attempts()[0].detail
    code, run, output = train("run", *words, world_size=world_size)
    assert (code, run.attempts[-1][1]) == (0, "completed"), output
