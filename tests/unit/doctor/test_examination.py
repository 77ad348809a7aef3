"""Jobs that never start, and records of ranks that arrive after the job's own, as on a shared file system."""

from __future__ import annotations

import importlib.metadata
import json
import threading
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.stored import to_yaml
from hpctrain.doctor.examination import Examination, JobNeverStartsError, wait_for_job, wait_for_records
from hpctrain.doctor.folder import DoctorFolder, DoctorJobRecord, DoctorOptions, write_record
from hpctrain.scheduler.slurm import Slurm
from tests.unit.fakes import FakeSlurm


@pytest.fixture
def folder(tmp_path: Path) -> DoctorFolder:
    found = DoctorFolder(tmp_path)
    found.ranks.mkdir()
    return found


def write(folder: DoctorFolder, rank: int, **values: object) -> None:
    folder.rank(rank).write_text(json.dumps({"rank": rank, "node": f"n{rank}", **values}))


def test_a_record_that_comes_late_is_waited_for(folder: DoctorFolder) -> None:
    write(folder, 0, stage="done")
    timer = threading.Timer(0.5, write, (folder, 1), {"stage": "done"})
    timer.start()
    assert sorted(wait_for_records(folder, 2, late_s=30)) == [0, 1]
    timer.join()


def test_a_rank_that_left_none_or_never_ended_is_not_waited_for_without_end(folder: DoctorFolder) -> None:
    write(folder, 0, stage="starting")
    assert list(wait_for_records(folder, 2, late_s=0.3)) == [0]


def test_a_rank_that_failed_has_ended(folder: DoctorFolder) -> None:
    write(folder, 0, stage="starting", error="ValueError: no")
    assert list(wait_for_records(folder, 1, late_s=1000)) == [0]


@pytest.mark.parametrize(
    "reason", ["BadConstraints", "PartitionTimeLimit", "QOSNotAllowed", "DependencyNeverSatisfied"]
)
def test_a_job_that_will_never_start_is_not_waited_for(folder: DoctorFolder, slurm: FakeSlurm, reason: str) -> None:
    slurm.queue(j8={"State": "PENDING", "Reason": reason})
    said: list[str] = []
    with pytest.raises(JobNeverStartsError, match=reason):
        wait_for_job(folder, "8", Slurm(slurm.environ, run=slurm.run), said.append)
    assert len(said) == 1
    assert said[0].startswith("job 8 is queued: ")


def test_a_job_that_will_never_start_is_cancelled(folder: DoctorFolder, slurm: FakeSlurm) -> None:
    slurm.queue(j8={"State": "PENDING", "Reason": "BadConstraints"})
    config = Composer().compose(["cluster=slurm", f"run_dir={folder.path}"])
    folder.request.write_text(to_yaml(config))
    client = Slurm(slurm.environ, run=slurm.run)
    examination = Examination(config, lambda _: None, options=DoctorOptions(), slurm=client)
    examination.result.job_id = "8"
    examination.read_job(folder)
    (found,) = examination.result.findings
    assert found.problem.startswith("the job will never start: no node satisfies its request")
    assert slurm.cancelled == ["8"]


def test_a_job_that_only_waits_for_its_turn_is_waited_for(folder: DoctorFolder, slurm: FakeSlurm) -> None:
    slurm.queue(j8={"State": "PENDING", "Reason": "Priority"})
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        write_record(folder.job, DoctorJobRecord(stage="done", nodes=("n1",)))

    record, state = wait_for_job(folder, "8", Slurm(slurm.environ, run=slurm.run), report)
    assert (record is not None and record.stage, state, len(said)) == ("done", "", 1)


SBATCH = """\
if [ $1 = --test-only ]; then echo asked >>{home}/asked; grep -q -e '{accepted}'; exit; fi
cat $1 >{home}/submitted; echo Submitted batch job 8
"""
SCONTROL = """\
case "$*" in
*node) printf 'NodeName=n1 Gres=gpu:a100:2 Partitions=low\nNodeName=n2 Gres=gpu:h100:2 Partitions=low\n';;
*partition) echo PartitionName=low Default=YES State=UP;;
*) printf 'SLURM_VERSION = 24.11.5\nClusterName = lab\n';;
esac
"""


@pytest.mark.parametrize(
    ("words", "accepted", "line", "num_asked"),
    [
        ([], "gpus-per-node=a100:2", "--gpus-per-node=a100:2", 1),
        ([], "gres=gpu:h100:2", "--gres=gpu:h100:2", 4),
        # with min_nodes, sbatch can't be asked for GPUs per task
        (["nodes=2", "cluster.min_nodes=1"], "gpus-per-task", "--gpus-per-node=2", 4),
        (["cluster.gpu_type=h100"], "gpus-per-task=h100", "--gpus-per-task=h100:1", 3),
        ([], "nothing", "--gpus-per-node=2", 6),
    ],
)
def test_gpus_are_requested_as_sbatch_accepts_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slurm: FakeSlurm,
    words: list[str],
    accepted: str,
    line: str,
    num_asked: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    slurm.script("sbatch", SBATCH.format(home=tmp_path, accepted=accepted))
    slurm.script("scontrol", SCONTROL)
    config = Composer().compose(["cluster=slurm", "cluster.gpus_per_node=2", *words])
    said: list[str] = []
    examination = Examination(config, said.append, options=DoctorOptions(), slurm=Slurm(slurm.environ))
    examination.check_slurm()
    assert examination.submit() is not None
    assert (tmp_path / "submitted").read_text().count(f"\n#SBATCH {line}\n") == 1
    assert (tmp_path / "asked").read_text().count("asked") == num_asked
    # once a type is chosen, or typed, there is nothing to advise
    has_type = "a100" in line or "h100" in line or "gpu_type" in str(words)
    assert [finding.check for finding in examination.result.findings] == ["gpu type"] * (not has_type)


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["cluster.gpus_per_node=2", "cluster.gpu_type=v100"], "cluster.gpu_type=v100: "),
        (["cluster.sbatch.gres=gpu:v100:2"], "cluster.sbatch.gres=gpu:v100:2: v100 "),
    ],
)
def test_a_type_of_gpu_that_the_site_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm, words: list[str], setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    slurm.script("sbatch", "echo Requested node configuration is not available >&2; exit 1")
    slurm.script("scontrol", SCONTROL)
    examination = Examination(
        Composer().compose(["cluster=slurm", *words]),
        lambda _: None,
        options=DoctorOptions(),
        slurm=Slurm(slurm.environ),
    )
    assert examination.submit() is None
    (finding,) = examination.result.findings
    assert finding.problem == f"{setting}is not a type of GPU that the cluster has"
    assert finding.remedy == "choose a100 (2 per node, on 1 node), or h100 (2 per node, on 1 node)"


def test_a_python_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", version)
    examination = Examination(Composer().compose([]), lambda _: None, options=DoctorOptions())
    examination.check_login_node()
    assert examination.result.findings[0].problem.startswith("torch isn't installed in /")
