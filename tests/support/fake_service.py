"""A service for the sender's tests: it keeps what arrives in a file, which survives a killed sender."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from hpctrain.sync.service import NOTHING, OpenedRun, ServiceError


class FakeService:
    """A service as W&B (`asks_at_open`: it reports its last step, and confirms at the end) or as MLflow.

    Args:
        path: of the file.
        asks_at_open: which of the two.
        pause_s: seconds that each row takes.
        refuses_after: rows after which it refuses; None for never.
    """

    def __init__(
        self, path: Path, *, asks_at_open: bool, pause_s: float = 0.0, refuses_after: int | None = None
    ) -> None:
        self.confirms_at_close = asks_at_open
        self.path = path
        self.pause_s = pause_s
        self.refuses_after = refuses_after
        self.num_sent = 0
        self.next_step = 0
        self.found_again = False
        self.opened_with: list[str] = []
        self.states: list[str] = []

    def arrived(self) -> list[dict]:
        """Complete lines: a killed sender may have left the last one incomplete, which a service takes as none."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def destination(self, _):
        return str(self.path)

    def open(self, run, known_id):
        self.opened_with.append(known_id)
        if self.refuses_after == 0:
            raise ServiceError("401: who are you?")
        there = self.arrived()
        self.next_step = max((row["step"] for row in there), default=NOTHING) + 1
        is_known = bool(known_id and there)
        self.found_again = bool(there) and not is_known
        last_step = self.next_step - 1 if self.confirms_at_close else None if is_known else NOTHING
        run_id = known_id if is_known else run.digest
        return OpenedRun(run_id=run_id, address="https://service/run", last_step=last_step)

    def send(self, rows, *, in_doubt):
        asks = (in_doubt or self.found_again) and not self.confirms_at_close
        there = {row["step"] for row in self.arrived()} if asks else set()
        for row in rows:
            if row.step in there or (self.confirms_at_close and row.step < self.next_step):
                continue
            if self.num_sent == self.refuses_after:
                raise ServiceError("503: come back later")
            # in one write, as a request arrives as a whole
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            line = {"step": row.step, **row.values, **({"media": sorted(row.media)} if row.media else {})}
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            os.close(descriptor)
            self.num_sent += 1
            time.sleep(self.pause_s)

    def close(self, reported):
        self.states.append(reported.state)

    def abandon(self):
        self.states.append("abandoned")
