from __future__ import annotations

import logging
import re

import pytest
import torch

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError, DeviceError
from hpctrain.rank import devices
from hpctrain.rank.devices import choose_compatible_devices, choose_own_devices

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", number) for number in range(2))
ON_SLURM = ("cluster=slurm", "cluster.gpus_per_node=2")


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def rank(composer):
    return lambda *words: (ClusterEnvironment.from_environment({}), composer.compose(words))


@pytest.fixture
def torch_finds(monkeypatch):
    """Torch as on a machine with so many GPUs, of which its driver shows others, perhaps; and how it is built."""

    def install(gpus, *, shown=0, cuda=True, error=None):
        def begin():
            if error:
                raise RuntimeError(error)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "init", begin)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: cuda)
        monkeypatch.setattr(devices, "visible_gpus", lambda environ, build=None: shown)

    return install


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
    assert choose_own_devices(*rank(*words)) == expected


def test_a_rank_without_the_gpus_that_it_asked_for_blames_its_machine(rank, torch_finds):
    torch_finds(0, error="CUDA error: system not yet initialized\nmore")
    message = (
        r"^torch finds no GPU on \S+, but cluster\.gpus_per_node=2 \(CUDA error: system not yet initialized\): "
        r"run nvidia-smi or rocm-smi there, or set cluster\.gpus_per_node=0 to train on the CPU$"
    )
    for words in ([], ["precision=tf32"]):
        with pytest.raises(DeviceError, match=message) as raised:
            choose_compatible_devices(*rank(*ON_SLURM, *words), None)
        assert raised.value.machine_at_fault


@pytest.mark.parametrize("cuda", [True, False])
def test_a_rank_without_the_gpus_of_the_gres_names_it(rank, torch_finds, cuda):
    torch_finds(0, cuda=cuda, error="CUDA error")
    with pytest.raises((DeviceError, ConfigError), match=r"cluster\.sbatch\.gres=gpu:a100:2") as raised:
        choose_own_devices(*rank("cluster=slurm", "cluster.sbatch.gres=gpu:a100:2"))
    assert str(raised.value).endswith(", or type ~cluster.sbatch.gres to train on the CPU")


def test_a_driver_that_shows_gpus_which_torch_does_not_find_is_broken(rank, torch_finds):
    torch_finds(0, shown=1)
    with pytest.raises(DeviceError, match=r"but the driver lists 1 GPU: run nvidia-smi or rocm-smi there"):
        choose_own_devices(*rank())
    assert choose_own_devices(*rank("cluster.gpus_per_node=0")) == (CPU,)
    assert choose_own_devices(*rank("cluster=slurm")) == (CPU,)


@pytest.mark.parametrize(
    "said", ["No CUDA GPUs are available", "Found no NVIDIA driver on your system. Please check that you have one"]
)
def test_a_container_without_the_nodes_gpus_trains_on_the_cpu_unless_it_asked_for_some(rank, torch_finds, said):
    """/proc isn't the container's own."""
    torch_finds(0, shown=8, error=said)
    assert choose_own_devices(*rank()) == (CPU,)
    with pytest.raises(DeviceError, match=re.escape(said)):
        choose_own_devices(*rank(*ON_SLURM))


def test_a_build_without_cuda_is_not_the_machines_fault(rank, torch_finds, caplog):
    torch_finds(0, shown=2, cuda=False)
    caplog.set_level(logging.WARNING, "hpctrain.train")
    with pytest.raises(ConfigError, match=r"^cluster\.gpus_per_node=2: torch \S+ on \S+ is built without CUDA"):
        choose_own_devices(*rank(*ON_SLURM))
    assert choose_own_devices(*rank()) == (CPU,)
    assert "has 2 GPUs, but torch" in caplog.text
    assert "is built without CUDA: training on the CPU" in caplog.text


def test_a_machine_without_gpus_trains_on_the_cpu_unless_a_key_needs_one(rank, torch_finds, caplog):
    torch_finds(0)
    assert choose_compatible_devices(*rank("precision=bf16"), None) == (CPU,)
    assert not caplog.records
    broken = rank("precision=bf16")
    broken[1].precision.kind = "tf32"
    with pytest.raises(ConfigError, match=r"precision\.kind=tf32.*find out why torch finds no GPU on"):
        choose_own_devices(*broken)
