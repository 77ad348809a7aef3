"""The site file composes, and has what was typed and what was found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpctrain.config.cluster import Container, Requeue, Slurm
from hpctrain.config.compose import Composer
from hpctrain.doctor.folder import DoctorJobRecord, NodeAnswer
from hpctrain.doctor.site_file import site_changes, site_keys, site_name, site_text
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
    text = site_text(site_keys(typed, changes), "python -m hpctrain doctor", changes)
    assert "# partition: the cluster's default" in text
    file = tmp_path / "conf" / "cluster" / "lab.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    composed = Composer(folder=tmp_path).compose(["cluster=lab"]).cluster
    assert composed == replace(typed, partition="low", wait=False)


def test_names_of_clusters_become_names_of_options() -> None:
    assert [site_name(name) for name in ("Lab-2", "slurm", "", "a.b", "local")] == [
        "lab_2",
        "slurm_site",
        "site",
        "a_b",
        "local_site",
    ]
