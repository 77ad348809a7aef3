"""`hpctrain doctor` names each fault of a cluster with its node, and finds nothing on one that works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.slurm.programs.disk import mount, unmount

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox
    from tests.slurm.programs.disk import Disk

AHEAD_S = 90


class Doctor:
    """Examines a sandbox from a folder."""

    def __init__(self, sandbox: SlurmSandbox, folder: Path) -> None:
        self.sandbox = sandbox
        self.folder = folder
        (folder / "runs").mkdir()

    def examine(self, *words: str, code: int = 0, nodes: int = 4) -> dict[str, Any]:
        """Run the command with `--json`; returns its record."""
        done = self.run("doctor", "--json", "cluster=slurm", f"nodes={nodes}", "cluster.cpus_per_process=1", *words)
        assert done.returncode == code, done.stdout + done.stderr
        record: dict[str, Any] = json.loads(done.stdout)
        return record

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run hpctrain."""
        return self.sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=self.folder, timeout=150)

    @contextmanager
    def hidden(self, node: str, path: Path) -> Iterator[None]:
        """Inside the context, a folder is empty on a node."""
        self.sandbox.on(node, "mount", "-n", "-t", "tmpfs", "hidden", str(path))
        try:
            yield
        finally:
            self.sandbox.on(node, "umount", str(path))

    @contextmanager
    def replaced(self, node: str, path: Path, by: Path, *options: str) -> Iterator[None]:
        """Inside the context, a file or folder is another one on a node."""
        self.sandbox.on(node, "mount", "-n", "--bind", str(by), str(path))
        try:
            if options:
                self.sandbox.on(node, "mount", "-n", "-o", f"remount,bind,{','.join(options)}", str(path))
            yield
        finally:
            self.sandbox.on(node, "umount", str(path))

    def wrong_date(self) -> Path:
        """A `date` whose clock is ahead; the right one is kept beside it."""
        shutil.copy("/usr/bin/date", self.folder / "right")
        wrong = self.folder / "wrong"
        wrong.write_text(f'#!/bin/sh\nexec {self.folder}/right -d "+{AHEAD_S} seconds" "$@"\n')
        wrong.chmod(0o755)
        return wrong


@pytest.fixture
def doctor(sandbox: SlurmSandbox, tmp_path: Path) -> Doctor:
    return Doctor(sandbox, tmp_path)


def found(record: dict[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Severity, check and nodes of each finding."""
    return [(one["severity"], one["check"], tuple(one["nodes"])) for one in record["findings"]]


def test_no_fault_is_found_on_a_cluster_that_works_and_the_site_file_trains(doctor: Doctor) -> None:
    record = doctor.examine()
    assert record["findings"] == []
    assert len(record["measured"]["pairs"]) == 6
    assert {one["bytes"] for one in record["measured"]["reductions"]} >= {4, 1 << 20}
    assert record["measured"]["checkpoint_bytes"] > 1000
    site = doctor.folder / record["site_file"]
    assert "partition: low" in site.read_text()
    trained = doctor.run(f"cluster={site.stem}", "trainer.max_steps=1", "cluster.wait=true")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    # a request of another user may hold commands, which the site file would run in all jobs
    os.chown(Path(record["folder"]) / "request.yaml", 65_534, 65_534)
    site.unlink()
    again = doctor.run("doctor", record["folder"])
    assert "no fault was found" in again.stdout
    assert "belongs to another user, so no site file is written" in again.stdout
    assert not site.exists()


def test_three_nodes_with_a_fault_each_are_named_and_left_out(doctor: Doctor) -> None:
    with (
        doctor.hidden("n2", Path(sys.prefix)),
        doctor.hidden("n3", doctor.folder / "runs"),
        doctor.replaced("n4", Path("/usr/bin/date"), doctor.wrong_date()),
    ):
        record = doctor.examine(code=1)
    assert sorted(found(record)) == [
        ("error", "clock", ("n4",)),
        ("error", "folder", ("n3",)),
        ("error", "python", ("n2",)),
    ]
    assert f"{AHEAD_S}" in next(one["problem"] for one in record["findings"] if one["check"] == "clock")
    assert {tuple(pair[key] for key in ("first", "second")) for pair in record["measured"]["pairs"]} == {("n1", "n4")}
    assert "exclude: n2,n3" in (doctor.folder / record["site_file"]).read_text()


@pytest.mark.nightly
@pytest.mark.sandbox("--nodes=2")
def test_the_nodes_are_examined_outside_of_the_container(doctor: Doctor) -> None:
    image = ("cluster.container.image=/nosuch.sif", "cluster.container.engine=apptainer")
    assert doctor.examine(*image, "cluster.python=/only/in/the/image/python", nodes=2)["findings"] == []


@pytest.mark.nightly
def test_a_folder_that_a_node_may_not_write_to(doctor: Doctor) -> None:
    runs = doctor.folder / "runs"
    with doctor.replaced("n3", runs, runs, "ro"):
        record = doctor.examine(code=1)
    assert found(record) == [("error", "folder", ("n3",))]
    assert "Read-only file system" in record["findings"][0]["problem"]


@pytest.mark.nightly
def test_another_folder_under_the_same_name(doctor: Doctor) -> None:
    """Each node has a /scratch of its own: with the same folder on all of them, only the token tells them apart."""
    runs, other = doctor.folder / "runs", doctor.folder / "other"
    with doctor.replaced("n2", runs, other_runs(runs, other)):
        record = doctor.examine("run_dir=runs/a", code=1)
    assert found(record) == [("error", "folder", ("n2",))]
    assert "another folder" in record["findings"][0]["problem"]


def other_runs(runs: Path, other: Path) -> Path:
    """A folder like the one that the command will make."""
    (other / "a" / "nodes").mkdir(parents=True)
    (other / "a" / "token").write_text("another")
    assert runs.is_dir()
    return other


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["no folder", "no Python"])
def test_the_first_node_which_runs_the_batch_script(doctor: Doctor, fault: str) -> None:
    with doctor.hidden("n1", Path(sys.prefix) if fault == "no Python" else doctor.folder / "runs"):
        record = doctor.examine(code=1)
    assert found(record) == [("error", "python" if fault == "no Python" else "folder", ("n1",))]
    assert record["site_file"] is None


@pytest.mark.nightly
def test_a_slow_link(doctor: Doctor) -> None:
    doctor.sandbox.slow("n3")
    try:
        record = doctor.examine()
    finally:
        doctor.sandbox.mend("n3")
    assert found(record) == [("warning", "network", ("n3",))]
    assert "is slow" in record["findings"][0]["problem"]


@pytest.mark.nightly
def test_a_link_that_loses_packets(doctor: Doctor) -> None:
    doctor.sandbox.lossy("n2")
    try:
        record = doctor.examine()
    finally:
        doctor.sandbox.mend("n2")
    assert found(record) == [("warning", "network", ("n2",))]
    assert "loses packets" in record["findings"][0]["problem"]


@pytest.mark.nightly
def test_later_measurements_are_compared_with_the_first(doctor: Doctor) -> None:
    assert doctor.examine(nodes=2)["findings"] == []
    baseline = doctor.folder / "runs" / "doctor" / "baseline.json"
    stored = json.loads(baseline.read_text())
    (first,) = stored.values()
    first["figures"]["disk_bandwidth"] *= 100
    baseline.write_text(json.dumps(stored))
    (finding,) = doctor.examine(nodes=2)["findings"]
    assert (finding["severity"], finding["check"]) == ("warning", "baseline")
    assert "disk bandwidth" in finding["problem"]
    assert doctor.examine("--new-baseline", nodes=2)["findings"] == []
    assert json.loads(baseline.read_text()) != stored


@pytest.mark.nightly
@pytest.mark.sandbox("--mpi-default=pmix", "--no-requeue")
def test_an_mpi_plugin_that_cannot_load_and_jobs_that_are_not_requeued(doctor: Doctor) -> None:
    record = doctor.examine(code=1)
    assert found(record) == [("error", "mpi plugin", ())]
    assert len(record["measured"]["pairs"]) == 6
    site = doctor.folder / record["site_file"]
    trained = doctor.run(f"cluster={site.stem}", "nodes=2", "trainer.max_steps=1", "cluster.wait=true")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    # hpctrain's own jobs are requeued
    assert doctor.sandbox.job("2")["Requeue"] == "1"


@pytest.mark.nightly
def test_several_ranks_on_each_node(doctor: Doctor) -> None:
    record = doctor.examine("cluster.processes_per_node=2")
    assert record["findings"] == []
    assert len(record["measured"]["pairs"]) == 6


@pytest.mark.nightly
def test_a_python_of_the_ranks_that_no_node_has(doctor: Doctor) -> None:
    record = doctor.examine("cluster.python=/nowhere/bin/python", code=1)
    assert found(record) == [("error", "python", ("n1", "n2", "n3", "n4"))]
    assert "/nowhere/bin/python isn't there" in record["findings"][0]["problem"]


@pytest.mark.nightly
def test_ranks_meet_though_the_own_name_of_a_node_is_a_loopback_address(doctor: Doctor) -> None:
    hosts = doctor.folder / "hosts"
    lines = doctor.sandbox.on("n3", "cat", "/etc/hosts").splitlines()
    hosts.write_text("\n".join(["127.0.1.1 n3", *(line for line in lines if not line.endswith(" n3"))]) + "\n")
    with doctor.replaced("n3", Path("/etc/hosts"), hosts):
        # gloo gets the interface that leads to the other nodes
        assert doctor.examine()["findings"] == []


@pytest.mark.nightly
def test_the_command_can_leave_and_come_back(doctor: Doctor) -> None:
    environ = {**doctor.sandbox.environ}
    command = [sys.executable, "-m", "hpctrain", "doctor", "cluster=slurm", "nodes=1"]
    with subprocess.Popen(
        command, cwd=doctor.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = next(line for line in process.stdout if line.startswith("folder "))
        process.send_signal(2)
        assert "python -m hpctrain doctor" in process.stderr.read()
        assert process.wait(30) == 4
    folder = line.split()[-1]
    done = doctor.run("doctor", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no fault was found" in done.stdout


@pytest.mark.nightly
def test_a_disk_that_is_full_and_one_that_is_too_small(doctor: Doctor, disk: Disk) -> None:
    small = doctor.examine(f"run_dir={disk.path}/a", code=1)
    assert found(small) == [("error", "room", ())]
    assert "64 MB are needed" in small["findings"][0]["problem"]
    disk.fill()
    full = doctor.examine(f"run_dir={disk.path}/a", code=1)
    assert found(full) == [("error", "room", ())]
    assert "is out of space" in full["findings"][0]["problem"]
    assert full["job_id"] is None


@pytest.mark.nightly
def test_a_quota(doctor: Doctor, disks: Path) -> None:
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("a quota needs btrfs-progs here")
    image, place = doctor.folder / "image", disks / "quota"
    subprocess.run(["truncate", "-s", "600M", image], check=True)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
    place.mkdir()
    with ExitStack() as stack:
        mount("-o", "loop", str(image), str(place))
        stack.callback(place.rmdir)
        stack.callback(unmount, place)
        for command in (["subvolume", "create", place / "me"], ["quota", "enable", place]):
            subprocess.run(["btrfs", *command], check=True, capture_output=True)
        subprocess.run(["btrfs", "qgroup", "limit", "20M", place / "me"], check=True)
        record = doctor.examine(f"run_dir={place}/me/a", code=1)
    assert found(record) == [("error", "room", ())]
    assert "quota" in record["findings"][0]["problem"]
    assert "btrfs qgroup show" in record["findings"][0]["remedy"]


@pytest.mark.nightly
def test_a_model_whose_checkpoints_do_not_fit(doctor: Doctor, disks: Path) -> None:
    place = disks / "checkpoints"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=200m", "checkpoints", str(place))
    try:
        # six copies of 12 * 1024 ** 2 weights per layer, of 4 bytes each
        record = doctor.examine(f"run_dir={place}/a", "task=text", "model.width=1024", nodes=1, code=1)
    finally:
        unmount(place)
        place.rmdir()
    assert found(record) == [("error", "room", ())]
    assert "2 checkpoints" in record["findings"][0]["problem"]
