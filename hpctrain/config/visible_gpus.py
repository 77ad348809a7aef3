"""The GPUs of this machine that a process may use, counted without torch: from the drivers and the environment."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

# a folder per GPU, from the driver: nvidia-smi needs seconds if no process holds a GPU
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
# a folder per CPU and GPU, from AMD's driver
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide GPUs from a process; the last two count for AMD's only."""
_FOR_AMD = re.compile(r"^(hip|rocm)\b[^=\n]*= *['\"]", re.MULTILINE)


def visible_gpus(
    environ: Mapping[str, str], nvidia: Path = NVIDIA_GPUS, amd: Path = AMD_NODES, *, rocm: bool | None = None
) -> int:
    """Count the GPUs that a process may use here, without torch; ranks ask torch, which knows others too.

    Args:
        environ: the process's environment.
        nvidia: the folder in which NVIDIA's driver lists its GPUs.
        amd: the folder in which AMD's driver lists its GPUs.
        rocm: whether torch is built for AMD's GPUs, and not for NVIDIA's; None for the torch that is installed.
    """
    # many of AMD's processors contain a small GPU: it must not count for a torch that can't use it
    if _installed_for_amd() if rocm is None else rocm:
        return len(_visible_amd_gpus(environ, amd))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(nvidia.iterdir())) if nvidia.is_dir() else 0
    return present if listed is None else min(present, count_devices(listed))


@functools.cache
def _installed_for_amd() -> bool:
    spec = importlib.util.find_spec("torch")  # without an import, which takes more than a second
    return spec is not None and spec.origin is not None and built_for_amd(Path(spec.origin).with_name("version.py"))


def built_for_amd(version_file: Path) -> bool:
    """Whether this file, `version.py` of an installed torch, is that of a build for AMD's GPUs."""
    try:
        return _FOR_AMD.search(version_file.read_text(encoding="utf-8")) is not None
    except OSError:
        return False


def listed_gpus(environ: Mapping[str, str]) -> int | None:
    """Count the GPUs that the variables leave, on whatever machine; None if none of them is set."""
    # HIP reads CUDA_VISIBLE_DEVICES only in the place of its own
    own = "HIP_VISIBLE_DEVICES" in environ
    names = [name for name in VISIBLE_DEVICES if name in environ and not (own and name == "CUDA_VISIBLE_DEVICES")]
    return min((count_devices(environ[name]) for name in names), default=None)


def _visible_amd_gpus(environ: Mapping[str, str], nodes: Path) -> list[str]:
    """Return the AMD GPUs that a process may use, each as its UUID.

    ROCr takes its variable first; HIP then counts from 0 among what is left. Sources: ROCR-Runtime,
    `RvdFilter::BuildUsrDeviceList`; clr, `roc::Device::init`. An empty HIP_VISIBLE_DEVICES hides all, as for
    torch.cuda.device_count, which ranks ask; to HIP it is one that isn't set.
    """
    found = _amd_gpus(nodes)
    for listed in (
        environ.get("ROCR_VISIBLE_DEVICES"),
        environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")),
    ):
        if listed is not None:
            found = _chosen(listed, found)
    return found


def _amd_gpus(nodes: Path) -> list[str]:
    """Return the UUIDs of this machine's AMD GPUs, in their order; `NODE` in place of one that has none.

    Source: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c, `node_show`.
    """
    found = []
    folders = [folder for folder in nodes.iterdir() if folder.name.isdecimal()] if nodes.is_dir() else []
    for folder in sorted(folders, key=lambda folder: int(folder.name)):
        try:
            gpu_id = int((folder / "gpu_id").read_text())
            lines = (folder / "properties").read_text().splitlines()
        except (OSError, ValueError):
            continue  # EPERM: a control group hides this GPU, such as that of a SLURM job
        properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
        # both are 0 for a CPU
        if gpu_id and int(properties.get("simd_count", 0)):
            unique = int(properties.get("unique_id", 0))
            found.append(f"GPU-{unique:016X}" if unique else f"NODE-{folder.name}")
    return found


def _chosen(listed: str, present: list[str]) -> list[str]:
    """Return the GPUs that a list of indices and (beginnings of) UUIDs leaves; the first invalid one ends it."""
    chosen: list[str] = []
    for name in listed.upper().replace(" ", "").split(","):
        if name.startswith("GPU-"):
            meant = [uuid for uuid in present if uuid.startswith(name)]
        else:
            meant = present[int(name) :][:1] if name.isdecimal() else []
        if len(meant) != 1 or meant[0] in chosen:
            break
        chosen += meant
    return chosen


def count_devices(listed: str) -> int:
    """Count the GPUs in a value of CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in listed.split(",")]
    # as CUDA does: an invalid name hides its device and all later ones; SLURM sets NoDevFiles in jobs without GPUs
    invalid = (name in ("", "NoDevFiles") or name.startswith("-") for name in names)
    return next((number for number, hides in enumerate(invalid) if hides), len(names))
