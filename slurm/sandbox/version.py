"""Which SLURM the sandbox runs: this machine's packages, or another version that was unpacked elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path


def unpacked() -> Path | None:
    """The folder of another version, if PATH has its programs first; None for the packages of this machine.

    Such a folder has `bin` and `plugins`, as `unpack.sh` makes it.
    """
    program = shutil.which("slurmctld")
    folder = Path(program or "/").resolve().parent.parent
    return folder if (folder / "plugins").is_dir() else None
