"""Whole messages, as torch, NCCL and the libraries write them; where they come from is in the issues that are named."""

from __future__ import annotations

import pytest

from hpctrain.attempt.lost_gpu import DEVICE_CODE_ERROR, GPU_OUT_OF_MEMORY, GPU_UNUSABLE

HINTS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
COUNTING = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error "
)


def cuda(text: str, name: str = "cudaErrorX") -> str:
    """The message of `torch.AcceleratorError` for one of CUDA's codes, of torch 2.13."""
    place = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    return f"CUDA error: {text}\nSearch for `{name}' in {place} for more information.\n{HINTS}"


MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.31 GiB is free",
    # pytorch/pytorch#175431
    "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB of which 203.49 GiB is",
    cuda("out of memory", "cudaErrorMemoryAllocation"),
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other API call",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCGeneral.cpp:844",
    NCCL + "Cuda failure 2 'out of memory'",
    NCCL + "Cuda failure 'out of memory'",
    # sgl-project/sglang#1116
    NCCL + "Failed to CUDA calloc 67108864 bytes",
    # deepspeedai/DeepSpeed#3827
    (
        "NCCL error in: /opt/conda/conda-bld/pytorch_1670525541990/work/torch/csrc/distributed/c10d/"
        "ProcessGroupNCCL.cpp:1269, internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\n"
        "Last error:\nFailed to CUDA calloc async 1920 bytes\n"
    ),
    NCCL + "HIP failure 'out of memory' at /rccl/src/include/alloc.h:212",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    (
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasDgetrfBatched( handle, n, dA_array, ldda, "
        "ipiv_array, info_array, batchsize)`"
    ),
    # EleutherAI/lm-evaluation-harness#1689
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
]
FAULT = [
    # jade-hpc-gpu/jade-hpc-gpu.github.io#194
    cuda("uncorrectable ECC error encountered", "cudaErrorECCUncorrectable"),
    "HIP error: uncorrectable ECC error encountered\nHIP kernel errors might be asynchronously reported",
    # MIC-DKFZ/nnUNet#1519
    cuda("uncorrectable NVLink error detected during the execution", "cudaErrorNvlinkUncorrectable"),
    # daydreamlive/scope#749
    cuda("Invalid access of peer GPU memory over nvlink or a hardware error", "cudaErrorContained"),
    # E3SM-Project/E3SM#8699: two nodes of thousands
    cuda("CUDA-capable device(s) is/are busy or unavailable", "cudaErrorDevicesUnavailable"),
    "CUDA error: all CUDA-capable devices are busy or unavailable\n" + HINTS,
    "cuda runtime error (46) : all CUDA-capable devices are busy or unavailable at /pytorch/aten/src/THC/THCStorage.cu",
    NCCL + "Cuda failure 46 'CUDA-capable device(s) is/are busy or unavailable'",
    cuda("no CUDA-capable device is detected", "cudaErrorNoDevice"),
    "HIP error: no ROCm-capable device is detected\nHIP kernel errors might be asynchronously reported",
    # huggingface/huggingface_hub#4134
    COUNTING + "802: system not yet initialized",
    cuda("system not yet initialized", "cudaErrorSystemNotReady"),
    COUNTING + "803: system has unsupported display driver / cuda driver combination",
    COUNTING + "805: MPS client failed to connect to the MPS control daemon or the MPS server",
    cuda("the remote procedural call between the MPS server and the MPS client failed", "cudaErrorMpsRpcFailure"),
    "CUDA driver initialization failed, you might not have a CUDA gpu.",
    (
        "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
        "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
    ),
    cuda("unknown error", "cudaErrorUnknown"),
    # pytorch/pytorch#170045
    NCCL + "Cuda failure 999 'unknown error'",
]
KERNEL = [
    cuda("device-side assert triggered", "cudaErrorAssert"),
    cuda("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
    cuda("misaligned address", "cudaErrorMisalignedAddress"),
    cuda("hardware stack error", "cudaErrorHardwareStackError"),
    cuda("unspecified launch failure", "cudaErrorLaunchFailure"),
    "HIP error: device-side assert triggered\nHIP kernel errors might be asynchronously reported",
    NCCL + "Cuda failure 700 'an illegal memory access was encountered'",
]
OTHERS = [
    # of the installation, of the task, or of a fork after CUDA was used
    cuda("no kernel image is available for execution on the device", "cudaErrorNoKernelImageForDevice"),
    cuda("device kernel image is invalid", "cudaErrorInvalidKernelImage"),
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from",
    COUNTING + "804: forward compatibility was attempted on non supported HW",
    "No CUDA GPUs are available",
    cuda("initialization error", "cudaErrorInitializationError"),
    cuda("invalid device ordinal", "cudaErrorInvalidDevice"),
    cuda("peer mapping resources exhausted", "cudaErrorTooManyPeers"),
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda, b",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "HIP error: unknown error\nHIP kernel errors might be asynchronously reported at some other API call",
    NCCL + "HIP failure 'unknown error' at /rccl/src/enqueue.cc:1",
    NCCL + "Cuda failure 1 'invalid argument'",
    "is using CUDA Dynamic Parallelism, but the current configuration, like MPS, does not support it",
    "the camera's buffer is out of memory",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "memory") for text in MEMORY),
        *((text, "fault") for text in FAULT),
        *((text, "kernel") for text in KERNEL),
        *((text, None) for text in OTHERS),
    ],
)
def test_each_message_is_of_one_kind(text, expected):
    kinds = {"memory": GPU_OUT_OF_MEMORY, "fault": GPU_UNUSABLE, "kernel": DEVICE_CODE_ERROR}
    found = [kind for kind, messages in kinds.items() if messages.search(f"RuntimeError: {text}")]
    assert found == ([] if expected is None else [expected])
