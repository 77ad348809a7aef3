"""The exact command lines; those of Pyxis and Apptainer have run against imitations only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain.config.cluster import ENGINE_NAMES
from hpctrain.launch.containers import ENGINES, ContainerError, ch_run

RANK = ["python3", "-u", "-m", "hpctrain.train", "/runs/R"]
INSIDE = ["env", "PYTHONPATH=/runs/R/code/1", "GREETING=a, $b", *RANK]
SHIM = """\
#!/bin/sh
[ "$1" = exec ] || exit 90
shift
while :; do
    case $1 in
        --nv) shift ;;
        --bind|--pwd) [ -n "$2" ] || exit 91; shift 2 ;;
        -*) exit 92 ;;
        *) break ;;
    esac
done
[ "$1" = docker://pytorch/pytorch ] || exit 93
shift
exec "$@"
"""


def test_each_engine_that_a_configuration_may_name_starts_ranks():
    assert sorted(ENGINES) == sorted(ENGINE_NAMES)


def test_pyxis(container):
    assert container(engine="pyxis").enter(RANK) == (
        [
            "--container-image=/images/torch",
            "--container-name=hpctrain_12_1",
            "--container-mounts=/data:/data:ro,/scratch/me:/mine,/runs/R:/runs/R",
            "--container-workdir=/home/me/project",
            "--container-env=CUDA_VISIBLE_DEVICES,HPCTRAIN_CLAIM",
        ],
        INSIDE,
    )


def test_apptainer(container):
    expected = [
        *("apptainer", "exec", "--nv"),
        *("--bind", "/data:/data:ro", "--bind", "/scratch/me:/mine", "--bind", "/runs/R:/runs/R"),
        *("--pwd", "/home/me/project", "/images/torch", *INSIDE),
    ]
    assert container(engine="apptainer").enter(RANK) == ([], expected)
    expected.remove("--nv")
    assert container(engine="apptainer", has_gpus=False).enter(RANK) == ([], expected)


def test_an_imitation_of_apptainer_executes_the_rank(container, bin_folder):
    (bin_folder / "apptainer").write_text(SHIM)
    (bin_folder / "apptainer").chmod(0o755)
    program = "import os, sys; print(os.environ['GREETING'], os.environ['HPCTRAIN_CLAIM'], sys.argv[1])"
    given = container(engine="apptainer", image="docker://pytorch/pytorch")
    _, command = given.enter([sys.executable, "-c", program, "x y"])
    environ = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "HPCTRAIN_CLAIM": "3"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "a, $b 3 x y\n"


@pytest.mark.parametrize(("sets_variables", "option"), [(False, []), (True, ["--set-env"])])
def test_charliecloud(container, sets_variables, option):
    assert ch_run(container(), RANK, sets_variables=sets_variables) == [
        *("env", "USER=me", "ch-run", *option),
        *("--bind", "/data:/data", "--bind", "/scratch/me:/mine", "--bind", "/runs/R:/runs/R"),
        *("--cd", "/home/me/project", "/images/torch", "--", *RANK),
    ]


def test_charliecloud_finds_folders_for_its_mounts_in_the_image(container, tmp_path):
    image = tmp_path / "image"
    (image / "runs").mkdir(parents=True)
    (image / "ch").mkdir()
    (image / "ch" / "environment").write_text("PATH=/opt/bin\n")
    _, command = container(engine="charliecloud", image=str(image)).enter(RANK)
    assert "--set-env" in command
    for name in ("data", "mine", "runs/R"):
        assert (image / name).is_dir()


def test_an_image_of_charliecloud_without_a_place_for_a_mount_is_refused(container, tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "mine").write_text("")
    (tmp_path / "image" / "runs").write_text("")  # so that even root can't make a folder in it
    with pytest.raises(ContainerError, match=r"has no .*/image/runs/R for a mount, and it can't be made: .*make it"):
        container(engine="charliecloud", image=str(tmp_path / "image")).enter(RANK)


def test_a_named_image_of_charliecloud_is_not_a_folder(container, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch").mkdir()
    _, command = container(engine="charliecloud", image="torch").enter(RANK)
    assert command[command.index("--cd") :] == ["--cd", "/home/me/project", "torch", "--", *INSIDE]
    assert not list((tmp_path / "torch").iterdir())
