from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config.cluster import Mount
from hpctrain.config.compose import Composer
from hpctrain.launch.containers import RankContainer, in_order
from hpctrain.launch.prepare import plan
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.directory import RunDirectory

IMAGE = ["cluster.container.image=docker://pytorch/pytorch", "cluster.container.engine=apptainer"]


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def derived(composer, tmp_path, monkeypatch):
    """Derives the container of an attempt that was submitted in a folder below a repository."""
    (tmp_path / "repository" / "project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repository" / "project")

    def make(*words: str, copied: bool = False, **environ: str) -> RankContainer | None:
        made = plan(composer.compose(["cluster=slurm", "nodes=2", f"run_dir={tmp_path}/sweep/3", *words]))
        code = None
        if copied:
            run, folder = RunDirectory.at(tmp_path / "sweep" / "3"), tmp_path / "sweep" / "code" / "1f"
            code = CodeSnapshot(run=run, digest="1f", folder=folder, root=tmp_path / "repository", place="project")
        given = {"HPCTRAIN_CLAIM": "2", "PYTHONPATH": "/copy"}
        variables = {"SLURM_JOB_ID": "12", "SLURM_JOB_USER": "me", **environ}
        more = {"environ": variables, "step_variables": given, "nodes": ("n1", "n2"), "code": code}
        return RankContainer.of_attempt(made, 2, **more)

    return make


def test_without_an_image_there_is_none(derived):
    assert derived() is None


def test_everything_follows_from_the_run(derived, tmp_path):
    words = [*IMAGE, "cluster.container.mounts=[/data:/mnt:ro]", "cluster.container.env.A=1", "cluster.gpus_per_node=2"]
    found, run = derived(*words, copied=True, SLURM_RESTART_COUNT="4"), RunDirectory.at(tmp_path / "sweep" / "3")
    assert found == RankContainer(
        engine="apptainer",
        image="docker://pytorch/pytorch",
        mounts=(
            Mount("/data", "/mnt", True),
            *(
                Mount(path, path)
                for path in (f"{tmp_path}/repository", f"{tmp_path}/sweep/3", f"{tmp_path}/sweep/code")
            ),
        ),
        working_directory=f"{tmp_path}/repository/project",
        variables={"PYTHONPATH": "/copy", "A": "1"},
        from_node=("CUDA_VISIBLE_DEVICES", "HPCTRAIN_CLAIM"),
        name=f"{run.step_name}_12_4",
        bundle=run.bundle(f"{run.step_name}_12_4_2"),
        nodes=("n1", "n2"),
        user="me",
        has_gpus=True,
    )


def test_a_requeued_job_has_another_name(derived):
    first, second = derived(*IMAGE), derived(*IMAGE, SLURM_RESTART_COUNT="1")
    assert (first.name[-5:], second.name[-5:]) == ("_12_0", "_12_1")
    assert not first.has_gpus


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("/scratch", ["/scratch"]),
        ("/scratch:/scratch:ro", ["/scratch", "/scratch/runs/R"]),
        ("/scratch:/mnt", ["/mnt", "/scratch/runs/R"]),
        ("/scratch/runs/R/data/x/y", ["/scratch/runs/R", "/scratch/runs/R/data/x/y"]),
        ("/scratch2", ["/scratch2", "/scratch/runs/R"]),
    ],
)
def test_parents_are_mounted_first_and_what_is_seen_already_is_not(wanted, found):
    mounts = in_order([Mount.read(wanted)], [Path("/scratch/runs/R")])
    assert [one.inside for one in mounts] == found
