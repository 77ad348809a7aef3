"""Messages about a GPU: which of them report a lack of memory, a broken machine, or a fault of the task's own code.

Sources: cudaGetErrorString of CUDA 12.9; hipGetErrorString of ROCm's clr; torch's c10/cuda/CUDAFunctions.cpp and
ATen/cuda/Exceptions.h; NCCL's src/include/alloc.h and checks.h, and their copies in RCCL.
"""

from __future__ import annotations

import re

_REPORTED = (
    r"((CUDA|HIP) error: |(Cuda|HIP) failure (\d+ )?'|cuda runtime error \(\d+\) : |GetDeviceCount\(\)\..* Error \d+: )"
)
"""What comes before the text of an error code: from torch, from NCCL, from old torch, and when torch counts GPUs."""

GPU_OUT_OF_MEMORY = re.compile(
    rf"(CUDA|HIP) out of memory|{_REPORTED}out of memory|Failed to CUDA calloc"
    # cuBLAS, cuDNN, cuSOLVER, cuFFT, and AMD's: torch's allocator left them too little
    r"|\b[A-Z]+_(STATUS_)?ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    # what cublasCreate returns if the GPU is nearly full; from other calls it is a mistake in the code
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate"
)
"""The GPU has too little memory for the task; the same happens in every attempt."""

GPU_UNUSABLE = re.compile(
    rf"{_REPORTED}("
    r"uncorrectable (ECC|NVLink) error|Invalid access of peer GPU memory over nvlink or a hardware error"
    r"|(all )?CUDA-capable device\S* (is/)?are busy or unavailable|no (CUDA|ROCm)-capable device is detected"
    # the fabric manager isn't running; the driver was updated and the node not restarted; the MPS server is gone
    r"|system not yet initialized|system has unsupported display driver|.*MPS (client|server)"
    # what is left of a GPU that has fallen off the bus; HIP prints this for every error code without a text
    r"|(?<!HIP error: )(?<!HIP failure ')unknown error"
    r")"
    # torch's messages for codes 3 and 999 when it counts the GPUs; "initialization error" later is that of a fork
    r"|CUDA driver initialization failed|CUDA unknown error - this may be due to"
)
"""The machine is the cause: another node, or the same one after a repair, may run the task."""

DEVICE_CODE_ERROR = re.compile(
    r"device-side assert triggered|an illegal (memory access|instruction) was encountered|misaligned address"
    r"|invalid program counter|operation not supported on global/shared address space|unspecified launch failure"
    # of the kernel's call stack, not of the hardware
    r"|hardware stack error"
)
"""The code that runs on the GPU made a mistake: an index out of bounds in the task, or a kernel's own."""
