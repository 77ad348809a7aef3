from pathlib import Path

import pytest
import torch

from hpctrain.config.visible_gpus import build_of, count_devices, listed_gpus, visible_gpus


@pytest.mark.parametrize(
    ("listed", "count"), [("", 0), ("0", 1), ("2, 3", 2), ("0,-1,1", 1), ("NoDevFiles", 0), ("GPU-1a,GPU-2b,,3", 2)]
)
def test_an_invalid_name_hides_its_device_and_all_later_ones(listed, count):
    assert count_devices(listed) == count


def test_gpus_are_those_of_the_driver_that_the_process_may_use(tmp_path):
    assert visible_gpus({}, tmp_path / "gpus", tmp_path / "nodes", build="cuda") == 0
    for number in range(4):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    assert visible_gpus({}, tmp_path / "gpus", build="cuda") == 4
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,3"}, tmp_path / "gpus", build="cuda") == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, tmp_path / "gpus", build="cuda") == 4
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-5,1"}, tmp_path / "gpus", build="cuda") == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, tmp_path / "gpus", build="cuda") == 0


@pytest.fixture
def amd_nodes(tmp_path):
    """What AMD's driver shows of two CPUs and three GPUs, the last of which has no UUID."""
    folder = tmp_path / "nodes"
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
        ({"ROCR_VISIBLE_DEVICES": "0,0,1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,GPU-1faa000000000001"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1faa,0"}, 2),
        # the beginning of two UUIDs, and of none
        ({"ROCR_VISIBLE_DEVICES": "GPU-1F"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "1,GPU-ABCD,0"}, 1),
        ({"HIP_VISIBLE_DEVICES": "GPU-1f2e3d4c5b6a7988"}, 1),
        # HIP counts from 0 among those that ROCr leaves
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1,2"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "GPU-1FAA"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "GPU-1FAA"}, 0),
    ],
)
def test_amd_gpus_are_those_that_rocr_and_hip_leave(amd_nodes, tmp_path, variables, count):
    assert visible_gpus(variables, tmp_path / "gpus", amd_nodes, build="rocm") == count


def test_an_amd_gpu_of_another_job_is_not_counted(amd_nodes, tmp_path):
    """Linux refuses to read it: EPERM, for which a folder stands here, since root may read any file."""
    (amd_nodes / "3" / "gpu_id").unlink()
    (amd_nodes / "3" / "gpu_id").mkdir()
    found = {
        listed: visible_gpus(listed_by_rocr(listed), tmp_path, amd_nodes, build="rocm") for listed in (None, "1", "2")
    }
    assert found == {None: 2, "1": 1, "2": 0}


def listed_by_rocr(listed):
    return {} if listed is None else {"ROCR_VISIBLE_DEVICES": listed}


def test_gpus_count_only_for_a_torch_that_can_use_them(amd_nodes, tmp_path):
    """A processor of AMD's may contain a small GPU, which would ask a torch for CUDA for a second rank."""
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert visible_gpus({}, tmp_path / "gpus", amd_nodes, build="cuda") == 1
    assert visible_gpus({"HIP_VISIBLE_DEVICES": ""}, tmp_path / "gpus", amd_nodes, build="cuda") == 1
    assert visible_gpus({}, tmp_path / "nowhere", amd_nodes, build="cuda") == 0
    assert visible_gpus({}, tmp_path / "gpus", tmp_path / "nowhere", build="rocm") == 0
    assert visible_gpus({}, tmp_path / "gpus", amd_nodes, build="cpu") == 0
    assert visible_gpus({}, tmp_path / "gpus", amd_nodes, build="any") == 3
    assert visible_gpus({}, tmp_path / "gpus", tmp_path / "nowhere", build="any") == 1


def test_partitions_of_one_amd_gpu_have_its_uuid(amd_nodes, tmp_path):
    for number in (2, 3):
        (amd_nodes / str(number) / "properties").write_text("simd_count 440\nunique_id 77\n")
    for listed, count in (("0,1", 2), ("0,0", 1), ("GPU-000000000000004D", 0)):
        assert visible_gpus({"HIP_VISIBLE_DEVICES": listed}, tmp_path, amd_nodes, build="rocm") == count


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
