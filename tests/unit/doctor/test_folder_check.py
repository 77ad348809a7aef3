"""The file system of the runs, tried for real."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.doctor import folder_check
from hpctrain.doctor.finding import Severity
from hpctrain.doctor.folder_check import Trial, check_folder, disk_space_findings
from hpctrain.run.file_system import FileSystem, nearest_existing

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:31 / /proc rw - proc proc rw
40 22 0:40 / {folder} rw - lustre 10.0.0.1@o2ib:/scratch rw
50 22 0:50 / {folder}/with\\040space rw - nfs4 server:/home rw
"""


def test_a_folder_that_works_is_made_and_left_empty(tmp_path: Path) -> None:
    text, findings = check_folder(tmp_path / "deep" / "runs")
    assert findings == []
    assert text.endswith("B free")
    assert list((tmp_path / "deep" / "runs").iterdir()) == []


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, (finding,) = check_folder(tmp_path / "file" / "runs")
    assert (finding.check, finding.severity) == ("folder", Severity.ERROR)
    assert "set run_dir" in finding.remedy


def test_an_operation_that_does_not_work_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    trial = Trial("locks", refuse, "searches lock their journal", severity=Severity.WARNING)
    monkeypatch.setattr(folder_check, "TRIALS", (trial,))
    _, (finding,) = check_folder(tmp_path)
    assert finding.severity is Severity.WARNING
    assert "locks doesn't work (No locks available)" in finding.problem


def test_more_room_than_there_is(tmp_path: Path) -> None:
    (finding,) = disk_space_findings(tmp_path, 1 << 50, "for 2 checkpoints")
    assert finding.severity is Severity.ERROR
    assert "for 2 checkpoints" in finding.problem
    assert list(disk_space_findings(tmp_path, 1 << 20, "for logs")) == []
    assert list(tmp_path.iterdir()) == []


def test_hardly_any_files_that_can_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    values = {name: getattr(status, name) for name in dir(status) if name.startswith("f_")}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**{**values, "f_files": 100, "f_favail": 9}))
    (finding,) = disk_space_findings(tmp_path, 1, "for logs")
    assert "only 9 more files" in finding.problem
    assert "`quota -s`" in finding.remedy


def test_the_file_system_is_that_of_the_closest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(folder=tmp_path))
    (tmp_path / "with space").mkdir()
    assert FileSystem.of(tmp_path, mounts).kind == "lustre"
    assert FileSystem.of(tmp_path / "with space", mounts).kind == "nfs4"
    assert FileSystem.of(Path("/"), mounts).kind == "ext4"
    assert FileSystem.of(tmp_path, tmp_path / "absent").kind == "unknown"
    assert "lfs quota" in FileSystem.of(tmp_path, mounts).quota_command(tmp_path)
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
