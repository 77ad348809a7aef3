"""One record of each kind in a run's directory, and what someone may put in its place."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from tests.unit.fakes import manifest

START = {
    "event": "start",
    "attempt": 1,
    "job_id": "12",
    "nodes": ["n1"],
    "world_size": 2,
    "step": 0,
    "time": 1000.0,
    "restart_count": 0,
    "total_steps": 460,
    "launched": 990.0,
    "import_s": 1.0,
}
END = {
    "event": "end",
    "attempt": 1,
    "reason": "preempted",
    "step": 20,
    "time": 2000.0,
    "detail": "stopped after step 20",
    "saved_step": 20,
    "suspects": ["n1"],
    "exclude": ["n1"],
    "next": "requeue",
    "requeued_by": "hpctrain",
    "first_step_s": 1.0,
    "last_step": 20,
    "seen": 1990.0,
    "closed_late": True,
}
VERDICT = {
    "text": "nothing",
    "also": ["one"],
    "step": 20,
    "steps_timed": 3,
    "shares": {"data": 0.5},
    "slowest_rank": 1,
    "slowest_host": "n1",
    "slowest_ratio": 1.5,
    "samples_per_s_per_device": 9.0,
    "mfu": 0.5,
    "memory_peak_bytes": 5,
}
EXIT = {
    "rank": 1,
    "host": "n1",
    "reason": "failed",
    "step": 20,
    "message": "ValueError: no",
    "traceback": "",
    "blames_peer": False,
    "stop_signal": 15,
    "time": 1999.0,
}
METRICS = {"step": 20, "time": 1500.0, "train/loss": 0.5, "eval/loss": None, "nonfinite": {"eval/loss": "nan"}}
GONE = 2**22 - 1
"""No process has such a number here."""
LINES = {
    "attempts.jsonl": [START, END, {**START, "attempt": 2, "step": 20, "time": 3000.0}],
    "jobs.jsonl": [{"job_id": "12", "time": 900.0, "log": "x"}, {"cancelled": False, "time": 950.0}],
    "metrics.jsonl": [METRICS],
}
OBJECTS = {
    "attempts/0001/rank_1.json": EXIT,
    "attempts/0001/verdict.json": VERDICT,
    "attempts/0001/evaluation.json": {
        "step": 20,
        "means": {"eval/loss": 0.5},
        "best": {"name": "loss", "mode": "min", "value": 0.5},
        "best_step": 20,
    },
    "attempts/0002/times.json": {"train_s": 5.0, "last_step": 30, "seen": 3500.0},
    "attempts/0002/owner.json": {"host": socket.gethostname(), "pid": GONE},
    "manifest.json": {"command": "x", "varied": {"seed": 1}},
    "checkpoints/step_00000020/manifest.json": json.loads(manifest(20)),
}
ODD = [
    None,
    True,
    -1,
    1.5,
    10**400,
    2**63,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "text",
    "12 --all\x1b[2J\n",
    "a\0b",
    "9" * 500,
    "\ud800",
    "\udce9",
    "../../x",
    "\u202e[red][/][@click=x]",
    "x" * 5000,
    5e-324,
    2**40,
    0,
    [],
    ["a", 1],
    [[[]]],
    {},
    {"a": None},
    json.loads("[" * 300 + "]" * 300),
    json.loads('{"a":' * 90 + "1" + "}" * 90),
]
HUGE_BYTES = 2**42
WHOLE_FILES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "no JSON": lambda path: path.write_bytes(b"\xff\xfe\x00 {]"),
    "deep": lambda path: path.write_text("[" * 200_000 + "]" * 200_000),
    "a list": lambda path: path.write_text("[1]\n"),
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "huge": lambda path: (path.touch(), os.truncate(path, HUGE_BYTES)),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path.name),
}


def write_records(run: Path) -> None:
    """Write all of them into a run's directory."""
    for name, one in OBJECTS.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(manifest(20) if name.startswith("checkpoints/") else json.dumps(one).encode())
    for name, records in LINES.items():
        (run / name).write_text("".join(json.dumps(record) + "\n" for record in records))
