from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "timed.py"


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
def test_a_thread_that_runs_writes_its_stack_and_goes_on():
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "the end\n")
    stacks = done.stderr.split("Stack (most recent call first):\n")[1:]
    assert len(stacks) > 100
    assert all("timed.py" in stack and "in <module>" in stack for stack in stacks)
    assert not any("in call_on" in stack for stack in stacks)
