"""SLURM's settings, from the answers of several versions."""

from __future__ import annotations

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.scheduler.settings import Association, associations, minutes, partitions, settings

CONFIG = """\
Configuration data as of 2026-01-31T12:00:00
AccountingStorageType   = accounting_storage/none
ClusterName             = lab
CommunicationParameters = (null)
JobRequeue              = 1
KillWait                = 30 sec
MpiDefault              = none
MpiParams               = (null)
PreemptMode             = GANG,SUSPEND
SchedulerParameters     = bf_interval=2,max_array_tasks=10
SLURM_VERSION           = 24.11.5

Cgroup Support Configuration:
AllowedRAMSpace         = 100.0%
MpiDefault for others   = x=y

Slurmctld(primary) at ctl is UP
"""
PARTITIONS = """\
PartitionName=low AllowGroups=ALL Default=YES QoS=N/A GraceTime=10 MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP \
TotalCPUs=32 TotalNodes=4 PreemptMode=REQUEUE DefMemPerCPU=8192
PartitionName=gpu AllowGroups=ALL Default=NO GraceTime=0 MaxNodes=2 MaxTime=2-12:00:00 State=DOWN TotalNodes=9 \
PreemptMode=OFF
"""


def test_values_by_name() -> None:
    found = settings(CONFIG)
    assert (found.version, found.cluster) == ("24.11.5", "lab")
    assert found.number("KillWait") == 30
    assert found.text("SchedulerParameters") == "bf_interval=2,max_array_tasks=10"
    assert found.text("MpiParams") == found.text("MpiDefault") == found.text("Absent") == ""
    assert found.number("ClusterName") is None


def test_an_answer_without_a_version_is_refused() -> None:
    with pytest.raises(SchedulerError, match="SLURM_VERSION"):
        settings("slurm_load_ctl_conf error: Unable to contact slurm controller\n")


def test_partitions() -> None:
    low, gpu = partitions(PARTITIONS)
    assert (low.name, low.is_default, low.state, low.max_time_min, low.max_nodes) == ("low", True, "UP", None, 4)
    assert (low.grace_time_s, low.preempt_mode) == (10, "REQUEUE")
    assert (gpu.name, gpu.is_default, gpu.state, gpu.max_time_min, gpu.max_nodes) == ("gpu", False, "DOWN", 3600, 2)
    assert partitions("") == []


def test_associations() -> None:
    assert associations("lab|00:30:00\nroot|\nodd row\n") == [Association("lab", 30), Association("root", None)]


@pytest.mark.parametrize(
    ("text", "found"), [("UNLIMITED", None), ("30:00", 30), ("02:00:00", 120), ("1-00:00:00", 1440), ("", None)]
)
def test_durations(text: str, found: int | None) -> None:
    assert minutes(text) == found
