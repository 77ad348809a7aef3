from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from hpctrain.errors import CheckpointError, CheckpointUnlikeError, DeviceError, HpctrainError, RendezvousError
from hpctrain.rank.classification import Classification, classify
from hpctrain.run.reason import Reason

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/{}] "
CLOSED = GLOO.format("pair.cc:553") + "Connection closed by peer [127.0.0.1]:9093. This is typically caused by a crash."
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
    "Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
NCCL_SAYS = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, {}, NCCL version 2.21.5\n"
NCCL_ON_GPU = (
    NCCL_SAYS.format("unhandled cuda error (run with NCCL_DEBUG=INFO for details)")
    + "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


def test_an_error_of_the_users_that_skips_our_constructor_is_classified():
    class OwnError(HpctrainError):
        def __init__(self) -> None:
            Exception.__init__(self, "mine", "too")

    assert classify(OwnError(), 1) == Classification(Reason.FAILED, blames_peer=False)
    assert not HpctrainError().elsewhere


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(GLOO.format("unbound_buffer.cc:78") + "Timed out waiting 3000ms for recv operation"), "hang"),
        (RuntimeError(GLOO.format("unbound_buffer.cc:129") + "Timed out waiting 3000ms for send operation"), "hang"),
        (RuntimeError(GLOO.format("pair.cc:534") + "Application timeout caused pair closure"), "hang"),
        (DistStoreError("wait timeout after 3000ms, keys: /world/0"), "hang"),
        (RuntimeError(WATCHDOG), "hang"),
        (RuntimeError(CLOSED), "infrastructure"),
        (
            RuntimeError(GLOO.format("pair.cc:547") + "Read error [10.0.0.2]:80: Connection reset by peer"),
            "infrastructure",
        ),
        (DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), "infrastructure"),
        (RuntimeError("NCCL Error 2: unhandled system error"), "infrastructure"),
        (RuntimeError(GLOO.format("pair.cc:315") + "writev [10.0.0.2]:80: No route to host"), "infrastructure"),
        (RuntimeError("Gloo connectFullMesh failed with " + GLOO.format("pair.cc:144") + "no error"), "infrastructure"),
        (DistBackendError(NCCL_SAYS.format("remote process exited or there was a network error")), "infrastructure"),
        (DistBackendError(NCCL_SAYS.format("unhandled system error (run with NCCL_DEBUG=INFO)")), "infrastructure"),
        (DistBackendError(NCCL_SAYS.format("internal error - please report") + "Invalid argument"), "infrastructure"),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), "infrastructure"),
        (DistBackendError("NCCL communicator was aborted on rank 1."), "infrastructure"),
        (
            RuntimeError("[Rank 1] Some NCCL operations have failed or timed out. Due to the asynchronous nature"),
            "infrastructure",
        ),
        (
            DistBackendError(
                "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
                "key '0', but store->get('0') got error: Socket Timeout"
            ),
            "infrastructure",
        ),
        (DistBackendError(NCCL_SAYS.format("invalid usage (run with NCCL_DEBUG=WARN for details)")), "failed"),
        (DistBackendError("NCCL Error 4: invalid argument (run with NCCL_DEBUG=WARN for details)"), "failed"),
        # this rank's own GPU, whatever NCCL calls the error: no peer is lost, and the next attempt would end so too
        (DistBackendError(NCCL_ON_GPU + "Cuda failure 2 'out of memory'"), "failed"),
        (DistBackendError(NCCL_ON_GPU + "Failed to CUDA calloc async 608 bytes"), "failed"),
        (DistBackendError(NCCL_SAYS.format("internal error") + "Failed to CUDA calloc async 1920 bytes"), "failed"),
        (DistBackendError(NCCL_ON_GPU + "Cuda failure 700 'an illegal memory access was encountered'"), "failed"),
        # what another rank's end does to the mapping of its memory looks the same as a mistake of NCCL's
        (DistBackendError(NCCL_ON_GPU + "Cuda failure 1 'invalid argument'"), "infrastructure"),
        (RuntimeError("ProcessGroupGloo::allreduce: unsupported device type"), "failed"),
        (RuntimeError("Tensors must be CUDA and dense for ProcessGroupNCCL"), "failed"),
        (RuntimeError("No backend type associated with device type cpu; available: cuda:nccl, meta:gloo"), "failed"),
        (RuntimeError("my NCCL plug-in table has no row 7"), "failed"),
        (
            RuntimeError(
                "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= "
                "op.nbytes. 1000000 vs 1000. Is there a distributed collective mismatch in your code?"
            ),
            "failed",
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x6 and 5x3)"), "failed"),
        (TimeoutError("the download timed out after 30 s"), "failed"),
        (ConnectionResetError(104, "Connection reset by peer"), "failed"),
    ],
)
def test_errors_among_several_ranks(error, reason):
    assert classify(error, 2) == Classification(Reason(reason), blames_peer=reason != "failed")
    assert classify(error, 1) == Classification(Reason.FAILED), "a single rank has no peers"


@pytest.mark.parametrize("waited", [True, False])
def test_ranks_that_did_not_meet_are_not_the_tasks_fault(waited):
    error = RendezvousError("rank zero did not answer", waited=waited)
    assert classify(error, 2) == Classification(Reason.INFRASTRUCTURE, blames_peer=waited)


def test_an_error_with_another_ranks_checkpoint_points_at_that_rank():
    assert classify(CheckpointError("rank zero could not write it", elsewhere=True), 2) == Classification(
        Reason.FAILED, blames_peer=True
    )
    assert classify(CheckpointError("the disk is full"), 2) == Classification(Reason.FAILED)


def test_other_bytes_on_one_node_are_the_nodes_fault():
    assert classify(CheckpointUnlikeError("model.pt doesn't match its checksum"), 2) == Classification(
        Reason.INFRASTRUCTURE
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. "),
        RuntimeError("DataLoader worker (pid(s) 4711, 4712) exited unexpectedly"),
        RuntimeError("DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"),
        torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cuda"),
        torch.AcceleratorError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
        RuntimeError("Unexpected error from cudaGetDeviceCount(). Did you? Error 802: system not yet initialized"),
        DistBackendError(NCCL_ON_GPU + "Cuda failure 214 'uncorrectable ECC error encountered'"),
    ],
)
def test_errors_of_the_machine(error, world_size):
    assert classify(error, world_size) == Classification(Reason.INFRASTRUCTURE)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10"),
        torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegal"),
        torch.AcceleratorError("HIP error: invalid device function\nSearch for `hipErrorInvalidDeviceFunction' in"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_errors_of_the_task_on_a_gpu(error, world_size):
    assert classify(error, world_size) == Classification(Reason.FAILED)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("machine_at_fault", "reason"), [(True, Reason.INFRASTRUCTURE), (False, Reason.FAILED)])
def test_missing_gpus_are_the_machines_and_shared_ones_the_configurations(machine_at_fault, elsewhere, reason):
    error = DeviceError("no GPU", machine_at_fault=machine_at_fault, elsewhere=elsewhere)
    assert classify(error, 2) == Classification(reason, blames_peer=elsewhere)
