"""Runs that are struck by signals anywhere: every attempt ends, and the last one ends where a straight run does.

Points, victims and signals are drawn at random. What failed is told with its seed; HPCTRAIN_SOAK_SEED draws the same
again, which strikes at the same points, though not in the same microsecond.
"""

from __future__ import annotations

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
from strike import PHASES

from hpctrain.attempt.outcome import conclude
from hpctrain.attempt.unrecorded import close_silent
from hpctrain.drill.comparison import compare
from hpctrain.drill.evidence import read_evidence
from hpctrain.errors import ExitCode
from hpctrain.launch.local import free_port, rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.handover import Handover
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm

SEED = int(os.environ.get("HPCTRAIN_SOAK_SEED") or secrets.randbelow(10**6))
STEPS, SAVE_EVERY, EVALUATE_EVERY = 80, 15, 25
STEP_S = 0.015
BOUND_S = 100.0
GRACE_S, STOPPING_S = 4.0, 30.0
"""What ranks get to end by themselves once one of them ended badly, or stopped, as a launcher gives it to them.

Less than what a hang takes here: a rank that a second Ctrl-C ended where they meet leaves the others waiting.
"""
PER_RUN = 6
WORLD_SIZES = (1, 2, 3)
TRAINING = (
    *("task=custom", "task._target_=trial.Trial", "+task.dropout=0.3", "+task.batchnorm=true", "+task.noise=true"),
    *("+task.num_samples=56", "+task.eval_samples=30", "schedule=cosine", "optimizer.lr=0.01"),
    *("trainer.global_batch_size=12", f"trainer.max_steps={STEPS}", "trainer.max_epochs=null"),
    *(f"trainer.eval_every_steps={EVALUATE_EVERY}", f"checkpoint.every_steps={SAVE_EVERY}", "checkpoint.keep=3"),
    *("logger.tensorboard=false", "logger.samples=true", "logger.every_steps=7"),
    *("health.hang_timeout_s=40", "health.start_timeout_s=40", "health.eval_timeout_s=40", "health.save_timeout_s=40"),
)
"""A deadlock ends as a hang, with the stacks of all ranks, and so fails the test with what explains it."""

ENDING = ("last step", "after it")
LEAVING = (*ENDING, "the stop")
"""Phases in which a rank may be about to end, and has given the signals back by the time that it is struck."""
GENTLE = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")


@dataclass
class Struck:
    """One attempt that was struck, and how it went."""

    phase: str
    plan: dict
    launched: bool
    struck: list[dict] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    output: str = ""

    @property
    def in_order(self):
        """Nothing kept the ranks from leaving in good order."""
        interrupts = Counter(one["rank"] for one in self.struck if one["signal"] == "SIGINT")
        killed = any(one["signal"] == "SIGKILL" or not one["handled"] for one in self.struck)
        # at its very end a rank gives the signals back that it handled while this was read
        too_late = self.phase in LEAVING and any(code < 0 or code == 99 for code in self.codes)
        return not killed and not too_late and max(interrupts.values(), default=0) < 2

    def __str__(self):
        mode = "launched" if self.launched else "by hand"
        return f"{self.phase} ({mode}): {self.plan}\nstruck: {self.struck}\nexit codes: {self.codes}\n{self.output}"


class Ordeal:
    """One run, struck again and again."""

    def __init__(self, nursery, composer, folder, world_size, draw):
        self.nursery, self.folder, self.world_size, self.draw = nursery, folder, world_size, draw
        words = (*TRAINING, f"data.num_workers={int(draw.random() < 0.3)}")
        folder.mkdir(parents=True)
        self.directory = prepare(composer.compose([f"run_dir={folder / 'run'}", *words], world_size=world_size), words)
        self.ledger = Ledger(self.directory)
        self.sessions, self.told = [], []

    @property
    def saved_step(self):
        steps = self.directory.checkpoint_steps()
        return steps[-1] if steps else 0

    @property
    def completed(self):
        return any(attempt.reason is Reason.COMPLETED for attempt in self.ledger.attempts())

    def drawn(self, phase, struck_in):
        """A plan to strike in a phase."""
        draw = self.draw
        at, most = draw.choice(PHASES[phase])
        nth = draw.randint(1, most) if most else STEPS - self.saved_step
        everybody = list(range(self.world_size))
        victims = draw.choice([[draw.choice(everybody)], [draw.choice(everybody)], everybody])
        signals = ["SIGKILL"] if draw.random() < 0.25 else draw.choices(GENTLE, k=draw.choice([1, 1, 1, 2, 3]))
        striker = 0 if phase in ("save", "after it", "the stop") else draw.choice(everybody)
        # who strikes comes last, or others would be spared
        victims.sort(key=striker.__eq__)
        strikes = [{"rank": rank, "signal": signal} for signal in signals for rank in victims]
        if draw.random() < 0.5:
            for strike in strikes:
                strike["after_s"] = draw.choice([0.0, 0.0005, 0.002, 0.01])
            strikes[0]["after_s"] += 0.0005
        return {"folder": str(struck_in), "at": at, "nth": nth, "rank": striker, "strikes": strikes}

    def strike(self, phase):
        """An attempt that is struck in this phase, if it gets there."""
        struck_in = self.folder / f"struck_{len(self.told)}"
        struck_in.mkdir()
        told = Struck(phase, self.drawn(phase, struck_in), launched=self.draw.random() < 0.7)
        self.told.append(told)
        sooner = f"0:{self.draw.randint(1, 20)}:SIGTERM" if phase == "the stop" else ""
        self.attempt(told, sleep_s=0 if phase in ENDING else STEP_S, act=sooner)
        record = struck_in / "struck.jsonl"
        told.struck = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        self.check(told)
        return bool(told.struck)

    def finish(self):
        """Attempts that nobody disturbs, until the run is completed."""
        told = Struck("none", {}, launched=True)
        self.told.append(told)
        self.attempt(told, sleep_s=0)
        self.check(told)
        assert told.codes == [0] * self.world_size, str(told)
        assert self.completed, str(told)

    def attempt(self, told, sleep_s, act=""):
        plan, path = json.dumps(told.plan) if told.plan else "", str(self.directory.path)
        common = {"TRIAL_SLEEP": str(sleep_s), "TRIAL_ACT": act}
        if self.world_size == 1:
            told.launched = True
            numbers = [self.nursery.start("strike:run", plan, "resume", path, folder=self.folder, **common)]
        else:
            claimed = self.claim() if told.launched else None
            common |= Handover(attempt=claimed, token=secrets.token_hex(4)).variables()
            port = free_port()
            places = [rank_variables(rank, self.world_size, port) for rank in range(self.world_size)]
            numbers = [self.nursery.start("strike:rank", plan, path, **place, **common) for place in places]
        try:
            self.wait(numbers)
        finally:
            done = self.nursery.wait(*numbers)
            self.sessions += [one.pid for one in done]
            told.codes = [one.code for one in done]
            told.output = "\n".join(f"--- exit code {one.code}\n{one.output}" for one in done if one.output)
        if self.world_size > 1 and told.launched:
            conclude(self.directory, claimed, self.world_size)

    def claim(self):
        """An attempt, as a launcher begins it."""
        close_silent(self.directory, Slurm({}), None, self.world_size)
        return self.ledger.claim()

    def wait(self, numbers):
        """Wait for the ranks as srun does: when one has ended badly, the others don't get for ever."""
        deadline = ended_by = time.monotonic() + BOUND_S
        while None in (codes := [self.nursery.code(number) for number in numbers]):
            now = time.monotonic()
            if any(codes):
                stopped = set(codes) <= {None, ExitCode.FINISHED, ExitCode.INTERRUPTED}
                ended_by = min(ended_by, now + (STOPPING_S if stopped else GRACE_S))
            if now > ended_by:
                for number, code in zip(numbers, codes, strict=True):
                    if code is None:
                        self.nursery.kill(number)
                assert now <= deadline, f"no end within {BOUND_S:g} s; killed"
                return

    def check(self, told):
        """What must be so after each attempt."""
        attempts = self.ledger.attempts()
        # one that died without a word is closed by the next
        numbers = list(range(1, self.ledger.last_claim() + 1))
        assert [one.attempt for one in attempts if not one.open] in (numbers, numbers[:-1]), f"{attempts}\n{told}"
        for info in list_checkpoints(self.directory):
            assert info.intact, f"{info}\n{told}"
        if 99 in told.codes and told.phase not in LEAVING:
            early = {one["rank"] for one in told.struck if one["signal"] == "SIGINT" and not one["handled"]}
            assert {rank for rank, code in enumerate(told.codes) if code == 99} <= early, str(told)
        if not attempts:
            return
        last = attempts[-1]
        allowed = {Reason.COMPLETED, Reason.INTERRUPTED}
        if told.in_order:
            assert len(set(told.codes)) == 1, str(told)
            assert told.codes[0] == (0 if last.reason is Reason.COMPLETED else 4), str(told)
            assert last.reason in allowed, str(told)
            assert self.saved_step == (STEPS if last.reason is Reason.COMPLETED else last.end_step), str(told)
        elif told.launched and self.world_size > 1:
            assert last.reason in allowed | {Reason.INFRASTRUCTURE}, str(told)
        else:
            # nobody stands outside of the ranks
            assert last.reason in allowed | {Reason.INFRASTRUCTURE, None}, str(told)
        for one, following in itertools.pairwise(attempts):
            if one.start_step is not None and following.start_step is not None:
                assert one.start_step <= following.start_step, str(told)

    def left_behind(self):
        """Processes of the attempts' sessions."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
                command = (entry.parent / "cmdline").read_bytes()
            except OSError:
                continue
            # numbers come again: a stranger's session may have one of theirs
            ours = b"nursery" in command or str(self.folder).encode() in command
            if ours and int(session) in self.sessions and state not in "ZX":
                found[entry.parent.name] = command
        return found


@pytest.fixture
def straight(nursery, composer, tmp_path):
    """What runs that nobody disturbs leave, by world size."""
    found = {}
    for world_size in WORLD_SIZES:
        run = Ordeal(nursery, composer, tmp_path / f"straight_{world_size}", world_size, random.Random(0))
        run.finish()
        found[world_size] = read_evidence(run.directory)
    return found


def suffer(run, expected, limit):
    """Strike one run until it is completed, in every phase; returns what it went through."""
    # a run doesn't often outlive what it suffers at its end
    phases = sorted(run.draw.sample(list(PHASES), PER_RUN), key=ENDING.__contains__)
    struck = 0
    while not run.completed and struck < limit:
        struck += run.strike(phases[struck % len(phases)])
    if not run.completed:
        run.finish()
    differing = [row for row in compare(expected, read_evidence(run.directory)) if not row.equal]
    assert not differing, "\n\n".join(map(str, [*differing, *run.told]))
    deadline = time.monotonic() + 15
    while left := run.left_behind():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    return [told for told in run.told if told.struck]


@pytest.mark.parametrize("interruptions", [30, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_a_run_that_is_struck_anywhere_ends_as_a_straight_one(nursery, composer, straight, tmp_path, interruptions):
    def go_through(world_size):
        """Runs of one size, one after the other."""
        count, told = interruptions // len(WORLD_SIZES) + (world_size <= interruptions % len(WORLD_SIZES)), []
        numbers = itertools.count()
        while len(told) < count:
            name = f"run_{world_size}_{next(numbers)}"
            run = Ordeal(nursery, composer, tmp_path / name, world_size, random.Random(f"{SEED} {name}"))
            try:
                told += suffer(run, straight[world_size], min(count - len(told), PER_RUN))
            except BaseException as error:
                error.add_note(f"HPCTRAIN_SOAK_SEED={SEED}: {run.directory.path}")
                raise
        return told

    with ThreadPoolExecutor(len(WORLD_SIZES)) as pool:
        told = [one for done in pool.map(go_through, WORLD_SIZES) for one in done]
    assert len(told) == interruptions
    phases = Counter(one.phase for one in told)
    assert interruptions < 200 or phases.keys() == PHASES.keys(), phases
    print(f"HPCTRAIN_SOAK_SEED={SEED}: {len(told)} interruptions: {dict(phases)}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_attempt_that_died_without_a_word_is_closed_by_the_next(train, world_size):
    act = ",".join(f"{rank}:{STEPS // 2}:SIGKILL" for rank in range(world_size))
    words = (*TRAINING, "checkpoint.asynchronous=false")
    code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=act)
    assert (code, run.attempts) == (-9, [(0, "None", None)]), output
    code, run, output = train("run", *words, world_size=world_size)
    assert code == 0, output
    saved = STEPS // 2 // SAVE_EVERY * SAVE_EVERY
    ((_, reason, ended), last) = run.attempts
    assert (reason, last) == ("infrastructure", (saved, "completed", STEPS))
    assert saved <= ended < STEPS // 2
    assert Ledger(run.directory).attempts()[0].detail.startswith("ended without a word: ")


@pytest.mark.parametrize("world_size", [1, 2])
def test_loading_processes_that_are_killed_are_no_fault_of_the_task(train, world_size):
    words = (*TRAINING, "data.num_workers=1")
    code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=f"0:{STEPS // 2}:bereave")
    assert (code, [reason for _, reason, _ in run.attempts]) == (1, ["infrastructure"]), output
    assert "DataLoader worker" in Ledger(run.directory).attempts()[0].detail
    code, run, output = train("run", *words, world_size=world_size)
    assert (code, run.attempts[-1][1]) == (0, "completed"), output
