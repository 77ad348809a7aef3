"""The batch script's program of a job that trains several runs, one after another, as a search's does.

Each argument is RUN:STEP, which trains the run until it pauses at this step, or RUN, which trains it to its end. How
each one ended is a line of the file that comes first. Runs that have ended there are skipped when the job comes back.
"""

# ruff: noqa: E402 - the slow imports come after the signals are blocked
from __future__ import annotations

import signal

from hpctrain.supervise.signals import WATCHED, ignore_signals

signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

import os
import sys
from pathlib import Path

from hpctrain.config.resources import resources_of
from hpctrain.config.stored import load_run, to_yaml
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.config_change import change_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.supervise.__main__ import log_to_stdout
from hpctrain.supervise.job_supervisor import JobSupervisor


def main(ends: Path, words: list[str]) -> int:
    """Train the runs; return the exit code of the one that ended last."""
    log_to_stdout()
    supervisor = JobSupervisor(os.environ)
    done = [line.split()[0] for line in ends.read_text().splitlines()] if ends.exists() else []
    code = 0
    for word in words:
        if word in done:
            continue
        path, _, step = word.partition(":")
        directory = RunDirectory.existing(path)
        config = load_run(directory.config, [f"trainer.pause_at_step={step or 'null'}"])
        change_config(directory, to_yaml(config))
        ledger = Ledger(directory)
        earlier = ledger.last_claim()
        code, job_ends = supervisor.run(RunPlan(config, directory, resources_of(config)))
        reason = ledger.attempt(ledger.last_claim()).reason if ledger.last_claim() > earlier else None
        continues = job_ends and (reason is None or reason.meaning.requeued)
        if not continues:
            with ends.open("a") as file:
                file.write(f"{word} {reason} {int(code)}\n")
        if job_ends:
            break
    return code


if __name__ == "__main__":
    try:
        code = main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        ignore_signals()
    sys.exit(code)
