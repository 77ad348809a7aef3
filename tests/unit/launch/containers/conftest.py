"""A container of two ranks, with two GPUs on each node."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config.cluster import Mount
from hpctrain.launch.containers import RankContainer


@pytest.fixture
def container(tmp_path):
    """Makes a container, with other values for some attributes."""

    def make(**others: object) -> RankContainer:
        values = {
            "engine": "oci",
            "image": "/images/torch",
            "mounts": (Mount("/data", "/data", True), Mount("/scratch/me", "/mine"), Mount("/runs/R", "/runs/R")),
            "working_directory": "/home/me/project",
            "variables": {"PYTHONPATH": "/runs/R/code/1", "GREETING": "a, $b"},
            "from_node": ("CUDA_VISIBLE_DEVICES", "HPCTRAIN_CLAIM"),
            "name": "hpctrain_12_1",
            "bundle": tmp_path / "bundle",
            "nodes": ("n1", "n2"),
            "user": "me",
            "has_gpus": True,
        }
        return RankContainer(**(values | others))

    return make


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder for programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder
