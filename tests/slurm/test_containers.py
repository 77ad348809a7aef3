"""Ranks in containers of SLURM's own (runc) and of Charliecloud; the image is a folder of mount points."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain
from tests.slurm.programs.submitted_runs import STEPS, SubmittedRuns

REPOSITORY = Path(hpctrain.__file__).parents[1]
OF_NODE = ("/bin", "/etc", "/lib", "/lib64", "/usr")
EMPTY = ("dev", "proc", "sys", "tmp")


def seen_folders() -> list[str]:
    """The folders of this machine without which its Python, torch and hpctrain don't work."""
    pythons = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, REPOSITORY)}
    pythons.add(Path(sys.executable).resolve().parents[1])
    found = [Path(place) for place in OF_NODE if Path(place).exists()]
    for path in sorted(pythons, key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [str(path) for path in found]


def make_image(folder: Path, engine: str) -> Path:
    """An image that has nothing but mount points, in the form that an engine takes."""
    root = folder / "rootfs"
    for name in (*EMPTY, *(place.lstrip("/") for place in seen_folders())):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):  # ch-run mounts these
        (root / "etc" / name).touch()
    if engine != "oci":
        return root
    subprocess.run(["runc", "spec", "--bundle", str(folder)], check=True)
    config = json.loads((folder / "config.json").read_text())
    config["process"]["env"] = ["PATH=/usr/bin:/bin", "OF_IMAGE=1"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_container(runs: SubmittedRuns, engine: str) -> list[str]:
    image = runs.folder / "image"
    image.mkdir()
    mounts = [f"{path}:{path}:ro" if engine == "oci" else path for path in seen_folders()]
    return [
        f"cluster.container.image={make_image(image, engine)}",
        f"cluster.container.engine={engine}",
        f"cluster.container.mounts=[{','.join(mounts)}]",
        "cluster.container.env.OF_CONTAINER='$HOME, unchanged'",
        f"cluster.python={sys.executable}",
    ]


OCI, CHARLIECLOUD = pytest.mark.sandbox("--nodes=2", "--oci"), pytest.mark.sandbox("--nodes=2")
BY_USER_SIGNAL = pytest.mark.sandbox("--nodes=2", "--oci", "--preempt-send-user-signal")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("oci", marks=OCI),
        pytest.param("oci", marks=BY_USER_SIGNAL, id="oci, USR2"),
        pytest.param("charliecloud", marks=CHARLIECLOUD),
    ],
)
def test_a_preempted_run_ends_as_one_outside_of_a_container(runs: SubmittedRuns, engine: str) -> None:
    run = runs.train(*in_container(runs, engine))
    run.until_step(3)
    assert set(run.ranks().values()) == {0, 1}
    for pid in run.ranks():
        assert roots_of(pid) != roots_of(run.supervisor), "the rank is outside of the image"
    run.preempt()
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED", run
    (_, _, stopped), _ = run.story
    assert run.story == [(0, "preempted", stopped), (stopped, "completed", STEPS)], run
    assert run.batch_log.count("srun exited with code 0") == 2, run
    assert run.digest == runs.straight()


def roots_of(pid: int | None) -> list[str]:
    """What is mounted as a process's root folder."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [line.split()[3] for line in lines if line.split()[4] == "/"]


@pytest.mark.nightly
@OCI
def test_a_killed_rank_leaves_nothing_in_its_container(runs: SubmittedRuns) -> None:
    run = runs.train(*in_container(runs, "oci"), "checkpoint.every_steps=2")
    run.until_step(5)
    os.kill(run.rank(1), signal.SIGKILL)
    run.until_attempt(2)
    assert len(run.ranks()) <= 2, "those of the first attempt are gone"
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED", run
    assert run.reasons == ["infrastructure", "completed"], run
    assert run.attempts[0].job_id == run.attempts[1].job_id
    assert run.digest == runs.straight()


SHOW = """\
echo "rank $RANK of $WORLD_SIZE, task $SLURM_PROCID on $(hostname), in $PWD"
echo "container: $OF_CONTAINER; image: $OF_IMAGE; path: $PATH; gpus: $CUDA_VISIBLE_DEVICES"
echo "words: $1"
echo saved > "$HPCTRAIN_RUN_DIR/saved_by_$RANK"
"""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("oci", marks=[OCI, pytest.mark.nightly]),
        pytest.param("charliecloud", marks=CHARLIECLOUD),
    ],
)
def test_a_program_runs_in_the_image(runs: SubmittedRuns, engine: str) -> None:
    run = runs.new()
    program = runs.folder / "show.sh"
    program.write_text(SHOW)
    image = runs.folder / "image"
    words = in_container(runs, engine)
    if engine == "charliecloud":
        (image / "rootfs" / "ch").mkdir()
        (image / "rootfs" / "ch" / "environment").write_text("PATH=/usr/bin:/bin\nOF_IMAGE=1\n")
    runs.launch(run, ["sh", str(program), "one, 'two' $three"], *words, "cluster.gpus_per_node=1")
    assert run.until_ended() == "COMPLETED", run
    for rank, node in enumerate(run.attempts[0].nodes):
        log = run.directory.rank_log(rank).read_text()
        assert f"rank {rank} of 2, task {rank} on {node}, in " in log
        assert "container: $HOME, unchanged; image: 1; path: /usr/bin:/bin; gpus: 0" in log
        assert "words: one, 'two' $three" in log
        assert (run.directory.path / f"saved_by_{rank}").exists()
