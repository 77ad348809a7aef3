"""Makes many run directories as trainings on SLURM leave them, and a squeue that knows their jobs."""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

from hpctrain.config.compose import Composer
from hpctrain.config.stored import to_yaml
from hpctrain.run.checkpoint_manifest import ALGORITHM, FORMAT_VERSION, encode_manifest
from hpctrain.run.directory import RunDirectory

ARRAY = "70"
"""The job array of the sweep's runs."""
STEPS = 5000
EVERY = 10
"""Steps between two records of metrics.jsonl."""
STATES = ("running", "completed", "completed", "completed", "queued", "failed", "running", "completed")
"""The states of the runs, in turn."""


class ManyRuns:
    """Runs of a sweep, in `FOLDER/sweep/N`: each has two attempts, the first of which was preempted.

    Args:
        folder: for the runs, and for `bin`, the folder with squeue.
        count: of the runs.
        states: in turn; of `STATES`.
        records: in each metrics.jsonl.
    """

    def __init__(self, folder: Path, count: int, *, states: tuple[str, ...] = STATES, records: int = 400) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.records = records
        words = ["cluster=slurm", f"trainer.max_steps={STEPS}", f"run_dir={folder}/sweep/0"]
        self._config = to_yaml(Composer().compose(words))
        self._random = random.Random(0)
        self._began = time.time() - 3600
        self.states = [states[number % len(states)] for number in range(count)]
        self.runs = [self._make(number, state) for number, state in enumerate(self.states)]
        self._install_squeue()

    def grow(self, directory: RunDirectory, step: int) -> None:
        """Append a record of a step to a run's metrics.jsonl, and a line to its log."""
        with directory.metrics.open("a") as file:
            print(json.dumps(self._record(step, time.time())), file=file)
        with directory.rank_log(0).open("a") as file:
            print(f"step {step}/{STEPS}  train/loss {math.exp(-step / 2000):.4f}", file=file)

    def calls(self) -> list[str]:
        """The options of each call of squeue."""
        path = self.bin / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def environ(self) -> dict[str, str]:
        """Environment variables for a process that finds this squeue."""
        return {**os.environ, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def _make(self, number: int, state: str) -> RunDirectory:
        run = RunDirectory.at(self.folder / "sweep" / str(number))
        run.create(0o750)
        run.config.write_text(self._config.replace("/sweep/0\n", f"/sweep/{number}\n"))
        job = f"{ARRAY}_{number}"
        rate = 10 ** self._random.uniform(-4, -1)
        origin: dict[str, Any] = {
            "command": f"python -m hpctrain -m cluster=slurm optimizer.lr={rate:.2g}",
            "folder": str(self.folder),
            "varied": {"optimizer.lr": f"{rate:.2g}", "seed": str(number % 5)},
            "time": self._began,
            "git": {"commit": "0" * 40, "tree": "1" * 40, "diff": "+ a line\n" * 2000, "diff_left_out": False},
        }
        run.manifest.write_text(json.dumps(origin, indent=2))
        record = {"job_id": job, "time": self._began, "log": str(self.folder / "sweep" / f"{job}.out")}
        run.jobs.write_text(json.dumps(record) + "\n")
        if state != "queued":
            self._train(run, number, state, job)
        return run

    def _train(self, run: RunDirectory, number: int, state: str, job: str) -> None:
        reached = STEPS if state == "completed" else self.records * EVERY
        half = reached // 2
        spent = {"import_s": 3.1, "rendezvous_s": 1.2, "build_s": 0.4, "load_s": 0.1, "first_step_s": 0.5}
        spent |= {"train_s": 900.0, "eval_s": 30.0, "save_s": 4.0, "last_step": half, "seen": self._began + 1000}
        where: dict[str, Any] = {"job_id": job, "nodes": [f"n{number % 8}"], "world_size": 4, "total_steps": STEPS}
        ledger: list[dict[str, Any]] = [
            {
                "event": "start",
                "attempt": 1,
                **where,
                "step": 0,
                "time": self._began + 60,
                "launched": self._began + 50,
            },
            {"event": "end", "attempt": 1, "reason": "preempted", "step": half, "time": self._began + 1000, **spent},
            {"event": "start", "attempt": 2, **where, "step": half, "time": self._began + 1200},
        ]
        if state != "running":
            end = {"event": "end", "attempt": 2, "reason": state, "step": reached, "time": self._began + 2400}
            ledger.append(end | spent | {"last_step": reached})
        run.attempts.write_text("".join(json.dumps(record) + "\n" for record in ledger))
        for attempt in (1, 2):
            claim = run.attempt(attempt)
            claim.mkdir()
            (claim / "times.json").write_text(json.dumps(spent, indent=2))
            (claim / "verdict.json").write_text(json.dumps({"text": "data loading: set data.workers=4", "step": half}))
            best = {"name": "accuracy", "mode": "max", "value": 0.9}
            means = {"eval/accuracy": 0.875, "eval/loss": 0.5}
            record = {"step": half, "means": means, "best": best, "best_step": half}
            (claim / "evaluation.json").write_text(json.dumps(record))
            for rank in range(4):
                (claim / f"rank_{rank}.json").write_text(json.dumps({"rank": rank, "host": "n1", "step": half}))
        since = self._began + 60
        lines = [json.dumps(self._record(n * EVERY, since + 5 * n)) for n in range(1, self.records + 1)]
        run.metrics.write_text("\n".join(lines) + "\n")
        run.rank_log(0).write_text("".join(f"step {n * EVERY}/{STEPS}  train/loss 0.5\n" for n in range(self.records)))
        for step in (half // 2, half):
            self._save(run.checkpoint(step), step)

    def _save(self, path: Path, step: int) -> None:
        path.mkdir()
        entry = {"bytes": 0, "checksum": "0" * 32}
        record = {"format_version": FORMAT_VERSION, "algorithm": ALGORITHM, "step": step, "samples_seen": 0}
        record |= {"world_size": 1, "config_digest": "0" * 64, "weights_digest": "0" * 64, "time": self._began}
        names = ("model.pt", "optimizer.pt", "state.pt")
        (path / "manifest.json").write_bytes(encode_manifest(record | {"files": dict.fromkeys(names, entry)}))
        for name in names:
            (path / name).touch()

    def _record(self, step: int, when: float) -> dict[str, float]:
        loss = 2.3 * math.exp(-step / 2000) + self._random.uniform(0, 0.1)
        record = {"step": step, "time": round(when, 3), "train/loss": loss, "train/lr": 0.001, "train/epoch": step / 23}
        record |= {"throughput/samples_per_s": 5163.94438179486, "train/grad_norm": loss / 3}
        if step % (10 * EVERY) == 0:
            record |= {"eval/loss": loss * 1.1, "eval/accuracy": 1 - loss / 2.5}
        return record

    def _install_squeue(self) -> None:
        self.bin.mkdir()
        codes = {"running": ("RUNNING", "None"), "queued": ("PENDING", "Priority")}
        codes |= {"completed": ("COMPLETED", "None"), "failed": ("FAILED", "NonZeroExitCode")}
        rows = []
        for number, state in enumerate(self.states):
            name, reason = codes[state]
            ends = int(self._began) + 7200
            rows.append(f"{ARRAY}_{number}|{1000 + number}|{name}|0|{ends - 7200}|{ends}|N/A|1|4294901700|{reason}|\n")
        (self.bin / "rows").write_text("".join(rows))
        program = '#!/bin/sh\necho "$@" >> "${0%/*}/calls"\nexec cat "${0%/*}/rows"\n'
        for name, text in (("squeue", program), ("sacct", "#!/bin/sh\necho accounting storage is disabled; exit 1\n")):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
