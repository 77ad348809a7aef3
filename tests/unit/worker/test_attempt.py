from __future__ import annotations

import logging

import pytest
import torch

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError
from hpctrain.run.directory import RunDirectory
from hpctrain.worker.attempt import _log_to_file, devices_of
from hpctrain.worker.entry import close_log_files
from hpctrain.worker.rank import Rank

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", number) for number in range(2))


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def rank(composer):
    def build(*words):
        environment = ClusterEnvironment.from_environment({})
        return Rank(composer.compose(words), environment, handover=None, stop=None, times=None)

    return build


@pytest.fixture
def torch_finds(monkeypatch):
    def install(gpus):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)

    return install


ON_SLURM = ("cluster=slurm", "cluster.gpus_per_node=2")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], GPUS[:1]),
        (["cluster.gpus_per_node=0"], (CPU,)),
        ([*ON_SLURM], GPUS[:1]),
        ([*ON_SLURM, "cluster.gpus_per_process=2"], GPUS),
        ([*ON_SLURM, "parallel=data_parallel"], GPUS),
        (["cluster=slurm"], (CPU,)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_rank_computes_on_what_torch_finds(rank, torch_finds, words, expected):
    """Whatever the driver leaves in /proc: AMD's and those of WSL 2 leave nothing."""
    torch_finds(2)
    assert devices_of(rank(*words)) == expected


def test_a_rank_without_the_gpus_it_asked_for_warns_or_refuses(rank, torch_finds, caplog):
    torch_finds(0)
    caplog.set_level(logging.WARNING, "hpctrain.train")
    assert devices_of(rank("precision=bf16")) == (CPU,)
    assert not caplog.records
    assert devices_of(rank(*ON_SLURM)) == (CPU,)
    assert "cluster.gpus_per_node=2, but torch finds no GPU on " in caplog.text
    with pytest.raises(ConfigError, match=r"precision\.kind=tf32.*see why torch finds none on"):
        devices_of(rank(*ON_SLURM, "precision=tf32"))


def test_the_log_takes_any_text(tmp_path):
    directory = RunDirectory.at(tmp_path)
    directory.rank_log(0).parent.mkdir()
    stream = _log_to_file(directory, 0)
    stream.write("präzision \udc9b\n")
    close_log_files()
    assert directory.rank_log(0).read_bytes() == "präzision \\udc9b\n".encode()
