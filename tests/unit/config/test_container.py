from __future__ import annotations

import pytest

from hpctrain.config.cluster import Mount
from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/a", Mount("/a", "/a")),
        ("/a:ro", Mount("/a", "/a", True)),
        ("/a:/b", Mount("/a", "/b")),
        ("/a:/b:ro", Mount("/a", "/b", True)),
    ],
)
def test_mounts(text, mount):
    assert Mount.read(text) == mount


@pytest.mark.parametrize(
    ("engine", "image"),
    [
        ("pyxis", "/images/torch.sqsh"),
        ("pyxis", "nvcr.io#nvidia/pytorch:24.10-py3"),
        ("pyxis", "pytorch/pytorch"),
        ("apptainer", "/images/torch.sif"),
        ("apptainer", "docker://pytorch/pytorch"),
        ("charliecloud", "/images/torch"),
        ("charliecloud", "pytorch/pytorch"),
        ("oci", "/images/torch"),
    ],
)
def test_images(engine, image):
    words = [f"cluster.container.image={image!r}", f"cluster.container.engine={engine}"]
    config = Composer().compose(["cluster=slurm", *words, "cluster.container.env.PATH=/opt/bin:/bin"])
    assert (config.cluster.container.image, config.cluster.container.env) == (image, {"PATH": "/opt/bin:/bin"})


def test_a_program_that_starts_its_ranks_itself_fits_one_container_per_node():
    words = ["cluster=slurm", "cluster.container.image=/images/torch", "cluster.container.engine=oci"]
    composer = ProgramComposer(["python", "train.py"])
    composer.compose_run([*words, "cluster.processes_per_node=4", "run.processes=node"])
    with pytest.raises(ConfigError, match="starts one process in a container per node, but the run has 4 per node"):
        composer.compose_run([*words, "cluster.processes_per_node=4"])
