"""SLURM of other Debian releases, unpacked beside the installed one from the mirror that apt uses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

SANDBOX = Path(__file__).parents[2] / "slurm" / "sandbox"


def unpack(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SANDBOX / "unpack.sh"), *words]
    environ = {**os.environ, **(env or {})}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.nightly  # it downloads packages, and forky moves
@pytest.mark.parametrize(("name", "oldest"), [("trixie", (24, 11)), ("forky", (26, 5))])
def test_another_release_runs_jobs(
    start_sandbox: Callable[..., SlurmSandbox],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    oldest: tuple[int, int],
) -> None:
    done = unpack(name, str(tmp_path / name))
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.setenv("PATH", f"{tmp_path / name}/bin:{os.environ['PATH']}")
    sandbox = start_sandbox("--nodes=2")
    found = re.search(r"(\d+)\.(\d+)", sandbox.ask("sinfo", "--version"))
    assert found is not None
    assert tuple(map(int, found.groups())) >= oldest
    assert sandbox.ask("srun", "-N2", "hostname").split() in (["n1", "n2"], ["n2", "n1"])


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="only Debian and Ubuntu have apt-get")
def test_without_a_mirror_of_debian_it_says_what_to_set(tmp_path: Path) -> None:
    # apt, configured with no source at all; it would also delete the lists of this machine's sources
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    lines = f'Dir::Etc::SourceList "/dev/null";\nDir::Etc::SourceParts "-";\nDir::State::Lists "{tmp_path}/lists";\n'
    (tmp_path / "apt.conf").write_text(lines)
    done = unpack("trixie", str(tmp_path / "trixie"), env={"APT_CONFIG": str(tmp_path / "apt.conf")})
    assert done.returncode == 1, done.stdout
    assert "expected a mirror of Debian among apt's sources, found none; set DEBIAN_MIRROR" in done.stderr
