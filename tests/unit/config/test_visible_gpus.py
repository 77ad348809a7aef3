import shutil
from pathlib import Path

import pytest
import torch

from hpctrain.config.visible_gpus import AMD_NODES, NVIDIA_GPUS, build_of, count_devices, listed_gpus, visible_gpus


@pytest.mark.parametrize(
    ("listed", "count"), [("", 0), ("0", 1), ("2, 3", 2), ("0,-1,1", 1), ("NoDevFiles", 0), ("GPU-1a,GPU-2b,,3", 2)]
)
def test_an_invalid_name_hides_its_device_and_all_later_ones(listed, count):
    assert count_devices(listed) == count


def test_gpus_are_those_of_the_driver_that_the_process_may_use(tmp_path):
    assert visible_gpus({}, tmp_path, build="cuda") == 0
    for number in range(4):
        (tmp_path / NVIDIA_GPUS / str(number)).mkdir(parents=True)
    assert visible_gpus({}, tmp_path, build="cuda") == 4
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,3"}, tmp_path, build="cuda") == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, tmp_path, build="cuda") == 4
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-5,1"}, tmp_path, build="cuda") == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, tmp_path, build="cuda") == 0


def test_without_the_drivers_folder_its_devices_count(tmp_path):
    """In gVisor and LXD; what isn't a number isn't a GPU."""
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia0", "nvidia1", "nvidia10"):
        (tmp_path / "dev" / name).mkdir(parents=True)
    assert visible_gpus({}, tmp_path, build="cuda") == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path, build="cuda") == 1
    # of the host, in a container with some of its GPUs
    (tmp_path / NVIDIA_GPUS / "0").mkdir(parents=True)
    assert visible_gpus({}, tmp_path, build="cuda") == 1


@pytest.fixture
def with_smi(tmp_path):
    """The environment of a machine whose nvidia-smi is this shell script; it notes each call."""

    def install(script):
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\n{script}\n")
        program.chmod(0o755)
        return {"PATH": str(program.parent)}

    return install


LISTED = """
echo 'GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)'
echo '  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)'
echo 'GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c)'
"""


@pytest.mark.parametrize(("script", "count"), [(LISTED, 2), ("echo 'No devices were found'; exit 6", 0), ("exit 9", 0)])
def test_without_either_nvidia_smi_is_asked_once(tmp_path, with_smi, script, count):
    environ = with_smi(script)
    assert [visible_gpus(environ, tmp_path, build="cuda") for _ in range(2)] == [count, count]
    assert visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path, build="cuda") == min(1, count)
    assert (tmp_path / "calls").read_text() == "-L\n"


def test_nvidia_smi_is_a_last_resort(tmp_path, with_smi):
    environ = with_smi(LISTED)
    assert visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": ""}, tmp_path, build="cuda") == 0
    assert visible_gpus(environ, tmp_path, build="rocm") == visible_gpus(environ, tmp_path, build="cpu") == 0
    (tmp_path / "dev" / "nvidia0").mkdir(parents=True)
    assert visible_gpus(environ, tmp_path, build="cuda") == 1
    assert not (tmp_path / "calls").exists()


def test_an_nvidia_smi_that_hangs_counts_nothing(tmp_path, with_smi, monkeypatch):
    monkeypatch.setattr("hpctrain.config.visible_gpus.SMI_TIMEOUT_S", 0.2)
    assert visible_gpus(with_smi("exec /bin/sleep 60"), tmp_path, build="cuda") is None


def test_what_wsl_has_is_unknown_unless_nvidia_smi_lists_it(tmp_path, with_smi):
    (tmp_path / "dev" / "dxg").mkdir(parents=True)
    for build in ("cuda", "rocm", "any"):
        assert visible_gpus({}, tmp_path, build=build) is None
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path, build=build) is None
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path, build=build) == 0
    assert visible_gpus({}, tmp_path, build="cpu") == 0
    environ = with_smi(LISTED)
    assert visible_gpus(environ, tmp_path, build="cuda") == visible_gpus(environ, tmp_path, build="any") == 2


@pytest.fixture
def amd_nodes(tmp_path):
    """What AMD's driver shows of two CPUs and three GPUs, the last of which has no UUID."""
    folder = tmp_path / AMD_NODES
    for number, (gpu_id, simds, unique) in enumerate(
        [(0, 0, 0), (0, 0, 0), (51140, 440, 0x1F2E3D4C5B6A7988), (3472, 440, 0x1FAA000000000001), (9, 64, 0)]
    ):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
        # as of Linux 6.8, shortened
        properties = f"cpu_cores_count {0 if gpu_id else 64}\nsimd_count {simds}\nvendor_id 4098\n"
        (folder / str(number) / "properties").write_text(f"{properties}unique_id {unique}\nnum_xcc 1\n")
    return folder


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1,2,3"}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,-1,2"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "2, 0"}, 2),
        ({"ROCR_VISIBLE_DEVICES": ""}, 0),
        ({"ROCR_VISIBLE_DEVICES": "0,GPU-1faa000000000001"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1faa,0"}, 2),
        ({"HIP_VISIBLE_DEVICES": "GPU-1f2e3d4c5b6a7988"}, 1),
        # HIP counts from 0 among those that ROCr leaves
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "GPU-1FAA"}, 1),
    ],
)
@pytest.mark.usefixtures("amd_nodes")
def test_amd_gpus_are_those_that_rocr_and_hip_leave(tmp_path, variables, count):
    assert visible_gpus(variables, tmp_path, build="rocm") == count


def test_an_amd_gpu_of_another_job_is_not_counted(amd_nodes, tmp_path):
    """Linux refuses to read it: EPERM, for which a folder stands here, since root may read any file."""
    (amd_nodes / "3" / "gpu_id").unlink()
    (amd_nodes / "3" / "gpu_id").mkdir()
    found = {listed: visible_gpus(listed_by_rocr(listed), tmp_path, build="rocm") for listed in (None, "1")}
    assert found == {None: 2, "1": 1}


def listed_by_rocr(listed):
    return {} if listed is None else {"ROCR_VISIBLE_DEVICES": listed}


def test_gpus_count_only_for_a_torch_that_can_use_them(amd_nodes, tmp_path):
    """A processor of AMD's may contain a small GPU, which would ask a torch for CUDA for a second rank."""
    (tmp_path / NVIDIA_GPUS / "0000:01:00.0").mkdir(parents=True)
    assert visible_gpus({}, tmp_path, build="cuda") == 1
    assert visible_gpus({"HIP_VISIBLE_DEVICES": ""}, tmp_path, build="cuda") == 1
    assert visible_gpus({}, tmp_path, build="cpu") == 0
    assert visible_gpus({}, tmp_path, build="any") == 3
    shutil.rmtree(tmp_path / NVIDIA_GPUS)
    assert visible_gpus({}, tmp_path, build="cuda") == 0
    (tmp_path / NVIDIA_GPUS / "0000:01:00.0").mkdir(parents=True)
    shutil.rmtree(amd_nodes)
    assert visible_gpus({}, tmp_path, build="rocm") == 0
    assert visible_gpus({}, tmp_path, build="any") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482-0f2d60242'\nxpu: Optional[str] = None\n", "rocm"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\nrocm: Optional[str] = '7.1'\n", "rocm"),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']\n", "cpu"),
        (None, "cuda"),
    ],
)
def test_the_maker_for_which_torch_is_built(tmp_path, text, expected):
    file = tmp_path / "version.py"
    if text is not None:
        file.write_text(f"from typing import Optional\n{text}")
    assert build_of(file) == expected


def test_the_installed_torch():
    expected = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    assert build_of(Path(torch.__file__).with_name("version.py")) == expected


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, 1),
    ],
)
def test_gpus_that_the_variables_list(variables, count):
    assert listed_gpus(variables) == count
