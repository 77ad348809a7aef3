"""The GPUs of this machine that a process may use, counted without torch: from the drivers and the environment."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

NVIDIA_GPUS = "proc/driver/nvidia/gpus"
"""A folder per GPU, from NVIDIA's driver."""
AMD_NODES = "sys/class/kfd/kfd/topology/nodes"
"""A folder per CPU and GPU, from AMD's driver."""
WSL_DEVICE = "dev/dxg"
"""WSL 2's device for GPUs: it shows that there are some, not how many."""
SMI_TIMEOUT_S = 10.0
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide GPUs from a process; the last two count for AMD's only."""
_BUILT_FOR = re.compile(r"^(cuda|hip|rocm)\b[^=\n]*= *['\"]", re.MULTILINE)


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/"), *, build: str | None = None) -> int | None:
    """Count the GPUs that a process may use here, without importing torch; ranks ask torch, which knows others too.

    Args:
        environ: the process's environment.
        root: of the file system in which the drivers show their GPUs.
        build: `cuda`, `rocm` or `cpu`: the GPUs for which torch is built; `any` for a program that may not use it; None
            for the torch that is installed.

    Returns:
        The count; None if there may be GPUs, but it isn't known how many.
    """
    if build == "any":
        counts = [visible_gpus(environ, root, build=kind) for kind in ("cuda", "rocm")]
        return max(filter(None, counts), default=None if None in counts else 0)
    # many AMD processors have an integrated GPU: it must not count for a torch that can't use it
    build = installed_build() if build is None else build
    if build == "cpu":
        return 0
    if build == "rocm":
        limit = listed_gpus(environ)
        present = 0 if limit == 0 else _amd_gpus(root)
    else:
        names = environ.get("CUDA_VISIBLE_DEVICES")
        limit = None if names is None else count_devices(names)
        present = 0 if limit == 0 else _nvidia_gpus(environ, root)
    return present if present is None or limit is None else min(present, limit)


def _nvidia_gpus(environ: Mapping[str, str], root: Path) -> int | None:
    if (gpus := root / NVIDIA_GPUS).is_dir():
        return len(list(gpus.iterdir()))
    # gVisor and LXD pass the devices on, but not the folder
    if devices := [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]:
        return len(devices)
    # last, since it needs seconds if no process holds a GPU; under WSL 2 nothing else counts them
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    count = _count_by_smi(program) if program else 0
    return _none_or_unknown(root) if count == 0 else count


def _none_or_unknown(root: Path) -> int | None:
    return None if (root / WSL_DEVICE).exists() else 0


@functools.cache
def _count_by_smi(program: str) -> int | None:
    """Count the GPUs that nvidia-smi lists; None if it doesn't answer in time."""
    try:
        process = subprocess.Popen([program, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return 0
    try:
        output, _ = process.communicate(timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that is stuck may keep it for ever
            process.communicate(timeout=1)
        return None
    # it fails on a node without a driver; the lines of MIG devices are indented
    return 0 if process.returncode else sum(line.startswith("GPU ") for line in output.splitlines())


@functools.cache
def installed_build() -> str:
    """Return for which GPUs the installed torch is built; see `build_of`."""
    spec = importlib.util.find_spec("torch")  # without an import, which takes more than a second
    if spec is None or spec.origin is None:
        return "cuda"
    return build_of(Path(spec.origin).with_name("version.py"))


def build_of(version_file: Path) -> str:
    """Return for which GPUs torch is built: `cuda`, `rocm` or `cpu`.

    Args:
        version_file: `version.py` of an installed torch.
    """
    try:
        builds = {match[1] for match in _BUILT_FOR.finditer(version_file.read_text(encoding="utf-8"))}
    except OSError:
        return "cuda"
    return "rocm" if builds & {"hip", "rocm"} else "cuda" if builds else "cpu"


def listed_gpus(environ: Mapping[str, str]) -> int | None:
    """Count the GPUs that the variables leave, on whatever machine; None if none of them is set."""
    # HIP reads CUDA_VISIBLE_DEVICES only if HIP_VISIBLE_DEVICES isn't set
    has_hip = "HIP_VISIBLE_DEVICES" in environ
    names = [name for name in VISIBLE_DEVICES if name in environ and not (has_hip and name == "CUDA_VISIBLE_DEVICES")]
    return min((count_devices(environ[name]) for name in names), default=None)


def _amd_gpus(root: Path) -> int | None:
    """Count this machine's AMD GPUs; each partition of a GPU has a node of its own.

    Source: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c, `node_show`.
    """
    count = 0
    for folder in (root / AMD_NODES).glob("[0-9]*"):
        try:
            gpu_id = int((folder / "gpu_id").read_text())
            simds = re.search(r"^simd_count (\d+)$", (folder / "properties").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue  # EPERM: a control group hides this GPU, such as that of a SLURM job
        # both are 0 for a CPU
        count += bool(gpu_id and simds is not None and int(simds[1]))
    return count or _none_or_unknown(root)


def count_devices(devices: str) -> int:
    """Count the GPUs in a value of CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in devices.split(",")]
    # as CUDA does: an invalid name hides its device and all later ones; SLURM sets NoDevFiles in jobs without GPUs
    invalid = (name in ("", "NoDevFiles") or name.startswith("-") for name in names)
    return next((number for number, hides in enumerate(invalid) if hides), len(names))
