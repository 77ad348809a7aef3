"""A program that defines its task and trains it in its own process, as a notebook does.

python own_program.py FOLDER [STEP ...]: trains to the end, once straight and once interrupted in these steps. With one
step, it also tries what is refused, and what fails. FOLDER/report.json says what happened.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpctrain
from hpctrain.tasks import Task

STEPS = 40
WORDS = {
    "trainer.max_steps": STEPS,
    "trainer.global_batch_size": 8,
    "logger.every_steps": 4,
    "logger.tensorboard": False,
    "trainer.cudnn_benchmark": True,
    "task.width": 5,
}
interrupts: dict[int, list[signal.Signals]] = {}


class Line(Task):
    """Sends this process a signal while it computes the loss of some steps."""

    def __init__(self, width: int = 4) -> None:
        self.width = width
        self.calls = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, self.width), nn.Dropout(0.2), nn.Linear(self.width, 1))

    def train_dataset(self) -> TensorDataset:
        angles = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(angles, angles.sin())

    def eval_dataset(self) -> TensorDataset:
        return self.train_dataset()

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert torch.backends.cudnn.benchmark
        if model.training:
            self.calls += 1
            for number in interrupts.pop(self.calls, ()):
                signal.raise_signal(number)
            if self.calls > 3 * STEPS:
                time.sleep(0.05)  # it trains until it is cancelled
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def failing() -> Task:
    raise ValueError("no data")


class OnlyWrites:
    """An object that a program has put in place of standard output, with no more than `print` needs."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def output_to(stream: OnlyWrites | None) -> Iterator[None]:
    """Inside the context, standard output and error are this object."""
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = stream
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def process_state() -> tuple[object, ...]:
    """What training may change only for its own time."""
    umask = os.umask(0)
    os.umask(umask)
    logger = logging.getLogger("hpctrain")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch_settings = threads, cudnn, torch.are_deterministic_algorithms_enabled()
    rng = torch.get_rng_state().sum().item(), random.getstate()
    return umask, handlers, dict(os.environ), logger.handlers[:], logger.level, logger.propagate, torch_settings, rng


def summary(run: hpctrain.Run) -> dict[str, object]:
    """What a run has left."""
    records = [
        {name: value for name, value in record.items() if name.startswith(("step", "train/loss", "eval/"))}
        for record in run.metrics()
    ]
    attempts = [(str(one.reason), one.end_step) for one in run.status().attempts]
    return {"digest": run.checkpoints()[-1].weights_digest, "records": records, "attempts": attempts}


def train(folder: Path, name: str, steps: list[int]) -> hpctrain.Run:
    """Train to the end; each interruption is a Ctrl-C, after which the program resumes the run."""
    config = hpctrain.compose({**WORDS, "run_dir": folder / name}, task=Line)
    interrupts.clear()
    interrupts.update((step, [signal.SIGINT]) for step in steps)
    before = process_state()
    notes: list[str] = []
    while True:
        try:
            run = hpctrain.Run(folder / name).resume() if notes else hpctrain.fit(config)
        except KeyboardInterrupt as stop:
            notes += stop.__notes__
        else:
            assert len(notes) == len(steps)
            assert all(note.startswith("the training stopped and was saved; to resume: ") for note in notes)
            return run
        finally:
            assert process_state() == before


def passed_on(folder: Path) -> dict[str, list[object]]:
    """What a program gets after other signals, and after a Ctrl-C in a hurry."""
    found: dict[str, list[object]] = {}
    heard: list[object] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(signal.Signals(number).name))
    for name, signals in (("sigterm", [signal.SIGTERM]), ("twice", [signal.SIGINT, signal.SIGINT])):
        interrupts.clear()
        interrupts[5] = signals
        config = hpctrain.compose({**WORDS, "run_dir": folder / name}, task=Line)
        try:
            hpctrain.fit(config)
        except (hpctrain.RunFailedError, KeyboardInterrupt) as error:
            run = hpctrain.Run(folder / name)
            found[name] = [type(error).__name__, str(run.state), len(run.checkpoints()), *heard]
        heard.clear()
    return found


def in_a_thread(folder: Path) -> tuple[str, str]:
    """Train outside of the main thread, and stop from there; return what was done, and how it ended."""
    words = {**WORDS, "trainer.max_steps": 10**6, "trainer.max_epochs": None, "run_dir": folder / "thread"}
    config = hpctrain.compose(words, task=Line)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(hpctrain.fit, config)
        while not (folder / "thread" / "metrics.jsonl").exists():
            assert not training.done(), training.exception()
            time.sleep(0.01)
        try:
            hpctrain.fit(config)
        except hpctrain.HpctrainError as error:
            refused = str(error)
        run = hpctrain.Run(folder / "thread")
        done, ended = run.cancel(), training.exception()
    assert isinstance(ended, hpctrain.RunFailedError)
    assert run.state == "cancelled"
    return refused, done


def cancelled(folder: Path) -> str:
    """Train in the main thread, and cancel from another one; return the error."""
    words = {**WORDS, "trainer.max_steps": 10**6, "trainer.max_epochs": None, "run_dir": folder / "cancelled"}

    def cancel() -> None:
        while not (folder / "cancelled" / "metrics.jsonl").exists():
            time.sleep(0.01)
        hpctrain.Run(folder / "cancelled").cancel()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(cancel)
        try:
            hpctrain.fit(hpctrain.compose(words, task=Line))
        except hpctrain.RunFailedError as error:
            return str(error)
    raise AssertionError


def refusals(run: hpctrain.Run) -> list[str]:
    """What is refused, in one line each."""
    config, task = replace(run.config, run_dir=None), Line()
    slurm = hpctrain.compose(["cluster=slurm"]).cluster
    attempts: list[Callable[[], object]] = [
        lambda: hpctrain.submit(config),
        lambda: hpctrain.fit(replace(config, cluster=replace(config.cluster, processes_per_node=2))),
        lambda: hpctrain.fit(replace(config, cluster=slurm)),
        lambda: hpctrain.compose(["cluster=slurm"], task=Line),
        lambda: hpctrain.compose(task=task),
        lambda: hpctrain.compose(["task=digits"], task=Line),
        lambda: hpctrain.fit(hpctrain.compose(), task=Line),
        lambda: hpctrain.fit(hpctrain.compose(task=lambda: task)),
        lambda: run.resume(["task.width=6"]),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
        except hpctrain.ConfigError as error:
            found.append(str(error))
    assert len(found) == len(attempts)
    return found


def failure(folder: Path) -> tuple[str, str, list[str]]:
    """The error of a task reaches the program as it was raised."""
    try:
        with output_to(None):
            hpctrain.fit(hpctrain.compose([f"run_dir={folder / 'failing'}"], task=failing))
    except ValueError as error:
        return str(error), str(hpctrain.Run(folder / "failing").state), error.__notes__
    raise AssertionError


def main(home: Path, steps: list[int]) -> None:
    straight = train(home, "straight", [])
    interrupted = train(home, "interrupted", steps)
    report: dict[str, object] = {"straight": summary(straight), "interrupted": summary(interrupted)}
    if len(steps) == 1:
        first, second = straight.load_model().state_dict(), interrupted.load_model("best").state_dict()
        assert all(torch.equal(weights, second[name]) for name, weights in first.items())
        assert not straight.load_model(STEPS).training
        maker = partial(Line, width=5)
        with output_to(OnlyWrites()), torch.inference_mode():
            given = hpctrain.fit(hpctrain.compose({**WORDS, "run_dir": home / "given"}, task=maker), task=maker)
        assert not given.load_model(task=maker).training
        report |= {
            "given": summary(given),
            "thread": in_a_thread(home),
            "cancelled": cancelled(home),
            "failure": failure(home),
        }
        report |= {"refusals": refusals(straight), "passed_on": passed_on(home)}
    (home / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(step) for step in sys.argv[2:]])
