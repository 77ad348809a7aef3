"""The site file composes, and has what was typed and what was found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.cluster import Container, Requeue, Slurm
from hpctrain.config.compose import Composer
from hpctrain.doctor.folder import DoctorJobRecord, NodeAnswer
from hpctrain.doctor.site_file import (
    gpu_changes,
    gpu_remarks,
    gpu_requests,
    site_changes,
    site_keys,
    site_name,
    site_text,
)
from hpctrain.scheduler.settings import Partition

LOW = Partition({"PartitionName": "low", "MaxTime": "02:00:00"})


def test_a_request_that_works_as_it_is_adds_only_its_partition() -> None:
    record = DoctorJobRecord(nodes=("n1", "n2"), rank_nodes=("n1", "n2"))
    assert [(one.key, one.value) for one in site_changes(Slurm(), LOW, record)] == [("partition", "low")]
    assert site_changes(replace(Slurm(), partition="low"), LOW, record) == []
    assert site_changes(Slurm(), None, record) == []


def test_what_was_found_out_is_in_the_file() -> None:
    answers = {node: NodeAnswer(node, ended=node != "n4") for node in ("n1", "n2", "n3", "n4")}
    record = DoctorJobRecord(
        nodes=("n1", "n2", "n3", "n4"), answers=answers, rank_nodes=("n1",), plugin_refused="Invalid MPI type"
    )
    typed = replace(Slurm(), time_limit_min=600, srun_args=["--cpu-bind=cores"], exclude="n9")
    changes = {one.key: one.value for one in site_changes(typed, LOW, record)}
    assert changes == {
        "partition": "low",
        "time_limit_min": 120,
        "srun_args": ["--cpu-bind=cores", "--mpi=none"],
        "exclude": "n9,n2,n3",
    }


def test_the_file_is_an_option_with_the_keys_that_differ(tmp_path: Path) -> None:
    typed = replace(
        Slurm(),
        cpus_per_process=2,
        env={"NCCL_DEBUG": "WARN"},
        setup=["module load cuda"],
        requeue=replace(Requeue(), max_failures=5),
        container=Container(image="/images/torch", engine="oci", mounts=["/data:ro"]),
        wait=True,
    )
    changes = site_changes(typed, LOW, DoctorJobRecord(nodes=("n1",), rank_nodes=("n1",)))
    text = site_text(site_keys(typed, changes), "python -m hpctrain doctor", changes, ["a remark"])
    assert "# partition: the cluster's default\n# a remark\n" in text
    file = tmp_path / "conf" / "cluster" / "lab.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    composed = Composer(folder=tmp_path).compose(["cluster=lab"]).cluster
    assert composed == replace(typed, partition="low", wait=False)


@pytest.mark.parametrize(
    ("keys", "types", "first"),
    [
        ({}, [], [(None, None), ("gres", None), ("gpus_per_task_type", None)]),
        ({}, ["a100"], [(None, None), (None, "a100"), ("gres", None), ("gres", "a100")]),
        ({}, ["a100", "h100"], [(None, "a100"), (None, "h100"), ("gres", "a100"), ("gres", "h100")]),
        ({"gpu_type": "h100"}, ["a100", "h100"], [(None, "h100"), ("gres", "h100"), ("gpus_per_task_type", "h100")]),
        ({"gpu_request": "gres"}, ["a100", "h100"], [("gres", "a100"), ("gres", "h100")]),
        ({"gpu_request": "gres", "gpu_type": "h100"}, ["a100", "h100"], [("gres", "h100")]),
    ],
)
def test_requests_of_gpus_in_the_order_in_which_they_are_tried(
    keys: dict[str, str], types: list[str], first: list[tuple[str | None, str | None]]
) -> None:
    typed = Slurm(gpus_per_node=4, **keys)  # type: ignore[arg-type]
    requests = list(gpu_requests(typed, types))
    assert [(one.gpu_request, one.gpu_type) for one in requests][: len(first)] == first
    assert {one.gpus_per_node for one in requests} == {4}
    assert gpu_changes(typed, typed) == []
    changed = {change.key: change.value for change in gpu_changes(typed, requests[-1])}
    assert replace(typed, **changed) == requests[-1]


def test_names_of_clusters_become_names_of_options() -> None:
    assert [site_name(name) for name in ("Lab-2", "slurm", "", "a.b", "local")] == [
        "lab_2",
        "slurm_site",
        "site",
        "a_b",
        "local_site",
    ]


@pytest.mark.parametrize(
    ("keys", "types", "remarks"),
    [
        ({"gpus_per_node": 2}, ["a100", "h100"], ["values of cluster.gpu_type here: a100 and h100"]),
        (
            {"sbatch": {"gres": "gpu:2,nvme:1"}},
            ["a100"],
            ["values of cluster.sbatch.gres=gpu:TYPE:2 here: a100"],
        ),
        ({"gpus_per_node": 2}, [], []),
        ({"gpus_per_node": 0}, ["a100"], []),
    ],
)
def test_the_types_of_gpus_are_in_a_comment(keys: dict[str, Any], types: list[str], remarks: list[str]) -> None:
    assert gpu_remarks(Slurm(**keys), types) == remarks
