"""A run directory as a training leaves it, made without torch: records, media, checkpoints, attempts."""

from __future__ import annotations

import json

from hpctrain.files import append_json_line
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.checkpoint_manifest import ALGORITHM, FORMAT_VERSION, MANIFEST, encode_manifest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

EVAL_EVERY = 5


def values_of(step: int) -> dict[str, float]:
    """What a step logs: the same in each attempt."""
    return {"train/loss": 1 / step, "train/lr": 0.1 * step}


class LoggedRun:
    """Trains nothing.

    Args:
        directory: a new run directory.
        services: the group `logger` of its configuration.
    """

    def __init__(self, directory: RunDirectory, **services: object) -> None:
        self.directory = directory
        # JSON is YAML
        directory.config.write_text(json.dumps({"name": "made", "trainer": {"max_steps": 100}, "logger": services}))
        directory.manifest.write_text(json.dumps({"command": "python -m hpctrain", "varied": {}, "time": 1.0}))
        self.attempt = 0

    @classmethod
    def at(cls, directory: RunDirectory) -> LoggedRun:
        """A run that exists already."""
        run = cls.__new__(cls)
        run.directory = directory
        return run

    def train(self, start: int, end: int, *, save: bool = True, media: bool = False) -> None:
        """One attempt: log each step after `start`, which drops the records of later ones, and save after `end`."""
        self.attempt = Ledger(self.directory).claim()
        Ledger(self.directory).start(self.attempt, job_id=None, nodes=["n1"], world_size=1, step=start)
        sink = JsonLinesSink(self.directory.metrics, start)
        for step in range(start + 1, end + 1):
            sink.log(step, values_of(step))
            if step % EVAL_EVERY == 0:
                sink.log(step, {"eval/loss": 2 / step})
                if media:
                    self.log_text(step)
        sink.close()
        if save:
            self.save(end)

    def log_text(self, step: int) -> None:
        path = self.directory.media / "eval" / f"sample_{step:08d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"after {step}")
        file = f"media/eval/{path.name}"
        record = {"step": step, "time": 5.0, "name": "eval/sample", "kind": "text", "file": file}
        append_json_line(self.directory.media_records, record)

    def save(self, step: int) -> None:
        path = self.directory.checkpoint(step)
        path.mkdir()
        numbers = {"step": step, "samples_seen": step, "world_size": 1, "time": 1.0, "files": {}}
        texts = {"format_version": FORMAT_VERSION, "algorithm": ALGORITHM, "config_digest": "", "weights_digest": ""}
        (path / MANIFEST).write_bytes(encode_manifest(texts | numbers))

    def end(self, reason: Reason, step: int) -> None:
        Ledger(self.directory).end(self.attempt, reason=reason, step=step)

    def logged(self) -> list[dict]:
        """The records of metrics.jsonl, merged by step, as a service should have them."""
        rows: dict[int, dict] = {}
        for line in self.directory.metrics.read_text().splitlines():
            record = json.loads(line)
            record.pop("time")
            rows.setdefault(record["step"], {}).update(record)
        return [rows[step] for step in sorted(rows)]
