from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import DeviceError, RendezvousError
from hpctrain.rank.devices import (
    RankDevices,
    choose_devices,
    find_conflict,
    require_compatible_devices,
    resolve_backend,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BUSES = ["0000:17:00.0", "0000:65:00.0"]


def on_gpu(rank, *, host="n1", gpus=None, **fields):
    gpus = [BUSES[rank % 2]] if gpus is None else gpus
    return RankDevices(rank=rank, host=host, machine=host, gpus=gpus, name="NVIDIA H100", **fields)


def on_cpu(rank, *, host="n1", **fields):
    return RankDevices(rank=rank, host=host, machine=host, **fields)


def test_without_a_gpu_the_device_is_the_cpu():
    environment = ClusterEnvironment.from_environment({})
    assert choose_devices(environment, 2, use_gpu=False) == (CPU, CPU)
    if not torch.cuda.is_available():
        assert choose_devices(environment, 1, use_gpu=True) == (CPU,)


def test_the_backend_follows_the_devices_unless_it_is_named():
    assert [resolve_backend("auto", [device]) for device in (CPU, GPU)] == ["gloo", "nccl"]
    assert resolve_backend("gloo", [GPU]) == "gloo"


def test_ranks_on_the_cpu_and_ranks_with_a_gpu_each_fit_together():
    assert find_conflict([on_cpu(0), on_cpu(1)], "auto") is None
    assert find_conflict([on_gpu(0), on_gpu(1), on_gpu(2, host="n2"), on_gpu(3, host="n2")], "auto") is None


def test_ranks_without_a_gpu_among_others_are_named_with_their_nodes():
    found = [on_gpu(0), on_gpu(1), on_cpu(2, host="n2"), on_cpu(3, host="n2")]
    conflict = find_conflict(found, "auto")
    assert (conflict.ranks, conflict.machine_at_fault) == ([2, 3], True)
    assert conflict.message == (
        "ranks 2, 3 on n2 found no GPU, but rank 0 on n1 found one (NVIDIA H100), and all ranks must train on the same "
        "type of device: run nvidia-smi or rocm-smi on n2, or set cluster.gpus_per_node=0 to train on CPUs"
    )


def test_what_a_rank_reports_of_its_machine_comes_first():
    conflict = find_conflict([on_gpu(0), on_cpu(1, host="n2", problem="torch finds no GPU on n2")], "auto")
    assert (conflict.ranks, conflict.message, conflict.machine_at_fault) == ([1], "torch finds no GPU on n2", True)


def test_two_ranks_on_one_gpu_are_named_with_what_each_sees():
    found = [on_gpu(0, visible={"CUDA_VISIBLE_DEVICES": "0"}), on_gpu(1, gpus=BUSES[:1])]
    conflict = find_conflict(found, "auto")
    assert (conflict.ranks, conflict.machine_at_fault) == ([0], False)
    assert conflict.message == (
        "ranks 0, 1 on n1 have the same GPU (0000:17:00.0, NVIDIA H100; rank 0 sees CUDA_VISIBLE_DEVICES=0, rank 1 "
        "sees all GPUs), but with NCCL every rank needs its own, and MIG slices of one GPU count as the same: start at "
        "most one process per GPU (cluster.processes_per_node), remove options that bind GPUs from cluster.srun_args, "
        "or use parallel.backend=gloo"
    )


def test_ranks_may_share_a_gpu_if_nccl_is_told_so(monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert find_conflict([on_gpu(0), on_gpu(1, gpus=BUSES[:1])], "nccl") is None


def test_gpus_of_two_machines_with_one_name_and_those_that_gloo_serves_may_be_the_same():
    twins = [on_gpu(0, gpus=BUSES[:1]), RankDevices(rank=1, host="n1", machine="other", gpus=BUSES[:1], name="H100")]
    assert find_conflict(twins, "auto") is None
    assert find_conflict([on_gpu(0), on_gpu(1, gpus=BUSES[:1])], "gloo") is None


def test_a_model_on_several_devices_of_a_rank_may_use_one_twice():
    assert find_conflict([on_gpu(0, gpus=BUSES[:1] * 2), on_gpu(1, gpus=BUSES[1:])], "auto") is None


@pytest.fixture
def outcomes():
    """What each rank gets that shares its devices, in threads around a real store."""

    def share(*found, backend="auto"):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ends = {}

        def be_rank(own):
            mine = TCPStore("127.0.0.1", store.port, is_master=False)
            try:
                ends[own.rank] = require_compatible_devices(mine, own, len(found), backend)
            except DeviceError as error:
                ends[own.rank] = error

        threads = [threading.Thread(target=be_rank, args=(one,)) for one in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [ends[rank] for rank in range(len(found))]

    return share


def test_ranks_that_fit_go_on(outcomes):
    assert outcomes(on_gpu(0), on_gpu(1)) == [None, None]


def test_a_rank_on_the_cpu_among_gpus_is_at_fault_and_the_others_point_at_it(outcomes):
    errors = outcomes(on_gpu(0), on_cpu(1, host="n2"), on_gpu(2))
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "rank 1 on n2 found no GPU" in str(errors[0])
    assert [(error.machine_at_fault, error.elsewhere) for error in errors] == [
        (True, True),
        (True, False),
        (True, True),
    ]


def test_of_two_ranks_on_one_gpu_rank_zero_speaks_for_all(outcomes):
    errors = outcomes(on_gpu(0), on_gpu(1), on_gpu(2), backend="nccl")
    assert "ranks 0, 2 on n1 have the same GPU" in str(errors[0])
    assert [(error.machine_at_fault, error.elsewhere) for error in errors] == [
        (False, False),
        (False, True),
        (False, True),
    ]


def test_a_rank_whose_configuration_does_not_fit_its_machine_is_named_by_the_others(outcomes):
    broken = on_cpu(1, problem="precision.kind=tf32: needs NVIDIA GPUs", machine_at_fault=False)
    errors = outcomes(on_gpu(0), broken)
    assert [str(error) for error in errors] == ["precision.kind=tf32: needs NVIDIA GPUs"] * 2
    assert [(error.machine_at_fault, error.elsewhere) for error in errors] == [(False, True), (False, False)]


def test_a_rank_that_reports_nothing_is_named():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    with pytest.raises(RendezvousError, match=r"^ranks 1, 2 did not report any devices in time; check") as raised:
        require_compatible_devices(store, on_cpu(0), 3, "auto")
    assert raised.value.waited


def test_a_rank_reports_where_its_gpus_are(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA A100", pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0, uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = RankDevices.of(3, (GPU,), {"CUDA_VISIBLE_DEVICES": "2"})
    assert (found.rank, found.gpus, found.name, found.visible) == (
        3,
        ["0000:17:00.0"],
        "NVIDIA A100",
        {"CUDA_VISIBLE_DEVICES": "2"},
    )
    del properties.pci_bus_id
    assert RankDevices.of(3, (GPU,), {}).gpus == ["GPU-1"]
    assert RankDevices.of(3, (CPU,), {}).gpus == []


def test_a_gpu_that_does_not_answer_is_the_machines(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: system not yet initialized\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    with pytest.raises(
        DeviceError, match=r"can't query cuda:0 on \S+: CUDA error: system not yet initialized; run nvidia-smi"
    ) as raised:
        RankDevices.of(0, (GPU,), {})
    assert (raised.value.machine_at_fault, raised.value.elsewhere) == (True, False)
