from __future__ import annotations

import json
import os
import sys

import pytest

SQUEUE = """#!{python} -SE
import json, os, sys
home = os.path.dirname(sys.argv[0])
jobs = json.load(open(home + "/jobs.json"))
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
with open(home + "/questions", "a") as file:
    print(options.get("jobs"), file=file)
if jobs is None:
    sys.exit("squeue: error: Unable to contact slurm controller (connect failure)")
asked = options["jobs"].split(",")
if len(asked) == 1 and asked[0] not in jobs:
    sys.exit("slurm_load_jobs error: Invalid job id specified")
plain = dict.fromkeys(["JobID", "RestartCnt", "exit_code", "Requeue"], "0")
for job_id in asked:
    if job_id in jobs:
        known = {{**plain, "JobArrayID": job_id, **jobs[job_id]}}
        for item in options["Format"].split(","):
            name, _, end = item.partition(":")
            sys.stdout.write(known.get(name, "N/A") + end)
        print()
"""
SCANCEL = """#!{python} -SE
import json, os, sys
home = os.path.dirname(sys.argv[0])
with open(home + "/cancelled", "a") as file:
    print(*sys.argv[1:], file=file)
if os.path.exists(home + "/told"):
    print(open(open(home + "/told").read()).read(), file=open(home + "/told", "w"))
if os.path.exists(home + "/mute"):
    sys.exit("scancel: error: Unable to contact slurm controller (connect failure)")
jobs = json.load(open(home + "/jobs.json"))
jobs[sys.argv[1]]["State"] = "CANCELLED"
json.dump(jobs, open(home + "/jobs.json", "w"))
"""
SACCT = "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n"


class FakeSlurm:
    """squeue and scancel as SLURM 22.05 has them, without a cluster and without accounting."""

    def __init__(self, home) -> None:
        self.home = home
        for name, text in (("squeue", SQUEUE), ("scancel", SCANCEL), ("sacct", SACCT)):
            (home / name).write_text(text.format(python=sys.executable) if name != "sacct" else text)
            (home / name).chmod(0o755)
        self.queue()

    def queue(self, **jobs):
        """The jobs that it knows: fields by job id, which is written j12_3 for 12_3."""
        (self.home / "jobs.json").write_text(json.dumps({name[1:]: fields for name, fields in jobs.items()}))

    def vanish(self):
        """No controller answers from now on."""
        (self.home / "jobs.json").write_text("null")

    def questions(self):
        """The jobs that squeue was asked about, one entry per call."""
        return self._lines("questions")

    def cancelled(self):
        """The arguments of scancel, one entry per call."""
        return self._lines("cancelled")

    def _lines(self, name):
        path = self.home / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    home = tmp_path / "bin"
    home.mkdir()
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    return FakeSlurm(home)


@pytest.fixture
def no_slurm(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
