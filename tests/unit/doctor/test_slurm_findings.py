"""What SLURM's settings mean for a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.cluster import Slurm
from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.slurm_findings import SlurmView, slurm_findings, unreachable_slurm_findings
from hpctrain.errors import SchedulerError
from hpctrain.scheduler.gres import SiteGpus
from hpctrain.scheduler.settings import Association, Partition, Settings

VALUES = {
    "SLURM_VERSION": "22.05.8",
    "ClusterName": "lab",
    "JobRequeue": "1",
    "KillWait": "30 sec",
    "ProctrackType": "proctrack/cgroup",
}
LOW = {
    "PartitionName": "low",
    "Default": "YES",
    "State": "UP",
    "MaxTime": "1-00:00:00",
    "MaxNodes": "UNLIMITED",
    "TotalNodes": "8",
    "GraceTime": "60",
    "PreemptMode": "REQUEUE",
}


def view(
    *partitions: dict[str, str],
    settings: dict[str, str] | None = None,
    often: bool = True,
    gpus: SiteGpus | None = None,
    accounts: Sequence[Association] = (),
    **cluster: object,
) -> SlurmView:
    return SlurmView(
        settings=Settings({**VALUES, **(settings or {})}),
        partitions=[Partition({**LOW, **partition}) for partition in partitions],
        cluster=replace(Slurm(), **cluster),  # type: ignore[arg-type]
        nodes=4,
        saves_often=often,
        accounts=accounts,
        gpus=gpus or SiteGpus(),
    )


def findings(partition: dict[str, str] | None = None, **values: object) -> list[Finding]:
    return list(slurm_findings(view(partition or {}, **values)))  # type: ignore[arg-type]


def test_nothing_is_found_on_a_usual_cluster() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("arguments", "severity", "problem", "remedy"),
    [
        ({"settings": {"SLURM_VERSION": "19.05.2"}}, Severity.ERROR, "SLURM is 19.05.2", "administrators"),
        ({"sbatch": {"requeue": False}}, Severity.WARNING, "not to requeue", "cluster.sbatch.requeue"),
        ({"sbatch": {"no_requeue": True}}, Severity.WARNING, "not to requeue", "cluster.sbatch.requeue"),
        ({"partition": {"State": "DOWN"}}, Severity.ERROR, "low is DOWN", "cluster.partition"),
        ({"time_limit_min": 3000}, Severity.ERROR, "allows 1440 min", "cluster.time_limit_min=1440"),
        ({"partition": {"MaxNodes": "2"}}, Severity.ERROR, "at most 2 nodes", "lower nodes"),
        ({"partition": {"TotalNodes": "3"}}, Severity.ERROR, "at most 3 nodes", "lower nodes"),
        ({"partition": {"PreemptMode": "SUSPEND,GANG"}}, Severity.WARNING, "suspends", "health.hang_timeout_s"),
        (
            {"partition": {"GraceTime": "0"}, "often": False},
            Severity.WARNING,
            "without a grace",
            "checkpoint.every_min",
        ),
        ({"settings": {"KillWait": "5 sec"}}, Severity.NOTE, "KillWait=5 s", "cluster.signal_delay_s"),
    ],
)
def test_a_setting_that_matters(arguments: dict[str, object], severity: Severity, problem: str, remedy: str) -> None:
    (found,) = findings(**arguments)  # type: ignore[arg-type]
    assert found.severity is severity
    assert problem in found.problem
    assert remedy in found.remedy


A100, H100, PLAIN = (
    {"Partitions": partitions, "Gres": gres}
    for partitions, gres in (("low", "gpu:a100:4(S:0)"), ("low", "gpu:h100:8"), ("low", "gpu:2"))
)


@pytest.mark.parametrize(
    ("nodes", "keys", "problem", "remedy"),
    [
        ([A100], {"gpus_per_node": 4}, "a100 (4 per node, on 1 node)", "set cluster.gpu_type=a100"),
        (
            [A100, H100],
            {"gpus_per_node": 4},
            "a100 (4 per node, on 1 node) and h100 (8 per node, on 1 node)",
            "set cluster.gpu_type=a100, or h100",
        ),
        (
            [A100, H100],
            {"sbatch": {"gres": "gpu:4,nvme:1"}},
            "a100 (4 per node, on 1 node) and h100 (8 per node, on 1 node)",
            "set cluster.sbatch.gres=gpu:a100:4, or gpu:h100:4",
        ),
        ([A100], {"gpus_per_node": 4, "gpu_type": "a100"}, "", ""),
        ([A100], {"sbatch": {"gres": "gpu:a100:4"}}, "", ""),
        ([A100], {}, "", ""),
        ([PLAIN], {"gpus_per_node": 2}, "", ""),
        ([], {"gpus_per_node": 2}, "", ""),
        ([{**A100, "Partitions": "high"}], {"gpus_per_node": 4}, "", ""),
    ],
)
def test_the_types_of_gpus_are_named_to_a_request_without_one(
    nodes: list[dict[str, str]], keys: dict[str, object], problem: str, remedy: str
) -> None:
    found = list(slurm_findings(view({}, gpus=SiteGpus.of_nodes(nodes), **keys)))
    assert [(one.check, one.severity) for one in found] == [("gpu type", Severity.NOTE)] * bool(problem)
    assert [one.problem for one in found if problem in one.problem] == [one.problem for one in found]
    assert [one.remedy for one in found] == [remedy] * bool(problem)


@pytest.mark.parametrize(
    ("nodes", "keys", "text"),
    [
        ([], {}, ""),
        ([PLAIN], {}, "; GPUs: 2 per node; to request them: cluster.gpus_per_node=2"),
        ([A100], {}, "; GPUs: a100 (4 per node, on 1 node); to request them: cluster.gpus_per_node=4"),
        ([A100], {"gpus_per_node": 0}, "; GPUs: a100 (4 per node, on 1 node)"),
    ],
)
def test_the_gpus_of_the_partition_are_reported(
    nodes: list[dict[str, str]], keys: dict[str, object], text: str
) -> None:
    shown = view({}, gpus=SiteGpus.of_nodes(nodes), **keys).text
    assert shown.removesuffix(text).endswith("with 60 s of grace time")


def test_a_partition_that_is_not_there() -> None:
    gpu = {"PartitionName": "gpu", "Default": "NO"}
    (found,) = slurm_findings(view({}, gpu, partition="big"))
    assert "there is no partition big" in found.problem
    assert "low, gpu" in found.remedy
    assert [one.name for one in view({}, gpu, partition="gpu,low").chosen] == ["low", "gpu"]
    assert [one.name for one in view({}, gpu).chosen] == ["low"]
    (found,) = findings(partition={"Default": "NO"})
    assert found.problem == "there is no default partition"


def test_one_of_several_partitions_that_fits_is_enough() -> None:
    small = {"PartitionName": "small", "MaxNodes": "1"}
    assert list(slurm_findings(view(small, {}, partition="small,low"))) == []
    (found,) = slurm_findings(view(small, partition="small"))
    assert "at most 1 nodes" in found.problem


@pytest.mark.parametrize(
    ("enforced", "cluster", "problem"),
    [
        ("associations,limits,qos", {"account": "LAB", "time_limit_min": 60}, "your account allows 30 min"),
        ("associations,limits,qos", {"account": "lab", "time_limit_min": 30}, ""),
        ("associations", {"account": "lab", "time_limit_min": 60}, ""),
        ("associations,limits,qos", {"time_limit_min": 60}, ""),
    ],
)
def test_the_time_that_accounts_allow_where_that_is_enforced(
    enforced: str, cluster: dict[str, object], problem: str
) -> None:
    accounts = [Association("lab", 30), Association("free", None)]
    found = findings(settings={"AccountingStorageEnforce": enforced}, accounts=accounts, **cluster)
    assert [one.problem for one in found if problem not in one.problem] == []
    assert len(found) == bool(problem)


def test_frequent_saves_make_up_for_a_missing_grace_time() -> None:
    assert findings(partition={"GraceTime": "0"}, often=True) == []
    assert findings(partition={"GraceTime": "0", "PreemptMode": "OFF"}, often=False) == []


def test_a_slurm_that_does_not_answer_matters_less_where_nobody_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    silent = SchedulerError("no answer")
    assert list(unreachable_slurm_findings(silent, is_typed=False)) == []
    (tmp_path / "scontrol").touch(0o755)
    (found,) = unreachable_slurm_findings(silent, is_typed=False)
    assert (found.severity, found.problem.rpartition(": ")[2]) == (Severity.WARNING, "no answer")


def test_facts_for_the_reader() -> None:
    found = view({}).facts
    assert (found["SLURM"], found["cluster"], found["partition"], found["GraceTime"]) == ("22.05.8", "lab", "low", "60")
    assert found["MpiDefault"] == "none"
