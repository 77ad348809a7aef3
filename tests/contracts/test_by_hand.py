"""What the page on batch scripts of one's own says that they need stands in those that are shipped."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "by_hand.md").read_text()
SCRIPTS = [(ROOT / "slurm" / name).read_text() for name in ("train.sbatch", "torchrun.sbatch")]


def test_every_flag_that_a_script_of_ones_own_needs_is_in_the_shipped_ones():
    needed = PAGE.partition("must do too:")[2].partition("What they lack")[0]
    flags = [flag for code in re.findall(r"`([^`]+)`", needed) for flag in re.findall(r"--[^ ]+", code)]
    assert {"--kill-on-bad-exit=1", "--export=ALL", "--requeue"} <= set(flags)
    missing = {flag for flag in flags if not any(flag in script for script in SCRIPTS)}
    assert missing == {"--export=NONE"}, "that is what the job may be submitted with"


def test_torchrun_gets_the_time_to_save():
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in PAGE
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90\n" in SCRIPTS[1]
    assert all("#SBATCH --signal=USR2@90\n" in script for script in SCRIPTS)
