from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.config.cluster import Mount
from hpctrain.launch.containers import ContainerError, bundle_config, make_root, rank_words

CONFIG = {
    "ociVersion": "1.0.2",
    "hostname": "runc",
    "process": {
        "terminal": True,
        "cwd": "/",
        "env": ["PATH=/opt/conda/bin:/bin", "TERM=xterm"],
        "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
        "user": {"uid": 0, "gid": 0},
    },
    "root": {"path": "root", "readonly": True},
    "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["size=65536k"]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue"},
    ],
    "linux": {
        "cgroupsPath": "/elsewhere",
        "sysctl": {"net.core.somaxconn": "1"},
        "namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount", "cgroup")],
    },
}


@pytest.fixture
def image(tmp_path):
    """A bundle whose root has a folder, a file and a link."""
    root = tmp_path / "image" / "root"
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "entry.sh").write_text("")
    (root / "bin").symlink_to("usr/bin")
    (tmp_path / "image" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "image"


def written(container):
    return json.loads((container.bundle / "config.json").read_text())


def test_the_ranks_get_a_bundle_of_their_own(container, image):
    made = container(image=str(image))
    options, command = made.enter(["python3"])
    assert options == [f"--container={made.bundle}"]
    assert command[:2] == ["/bin/sh", "-c"]
    of_image = ["env", "PATH=/opt/conda/bin:/bin", "TERM=xterm"]
    assert command[3:] == ["n1 n2", *of_image, "env", "PYTHONPATH=/runs/R/code/1", "GREETING=a, $b", "python3"]
    config = written(made)
    assert config["root"] == {"path": "rootfs", "readonly": True}
    assert config["process"] == {
        "terminal": False,
        "cwd": "/home/me/project",
        "env": CONFIG["process"]["env"],
        "user": {"uid": 0, "gid": 0},
    }
    assert config["linux"] == {"namespaces": [{"type": "mount"}]}
    assert "hostname" not in config
    assert os.readlink(made.bundle / "rootfs" / "bin") == "usr/bin"  # noqa: PTH115 - its text is what counts
    mounts = {one["destination"]: (one["source"], *one.get("options", [])) for one in config["mounts"]}
    assert list(mounts) == [
        *("/entry.sh", "/usr", "/proc", "/sys"),
        *("/dev/shm", "/tmp", "/etc/hosts", "/etc/resolv.conf", "/data", "/mine", "/runs/R"),
    ]
    assert mounts["/usr"] == (f"{image}/root/usr", "rbind", "ro")
    assert mounts["/dev/shm"] == ("/dev/shm", "rbind")
    assert mounts["/etc/hosts"] == ("/etc/hosts", "rbind", "ro")
    assert (mounts["/data"], mounts["/mine"]) == (("/data", "rbind", "ro"), ("/scratch/me", "rbind"))


def test_of_a_user_s_namespace_the_kernel_s_folders_are_the_node_s(container):
    config = {**CONFIG, "linux": {"namespaces": [{"type": "user"}, {"type": "mount"}, {"type": "pid"}]}}
    made = bundle_config(config, container(), {})
    assert made["linux"]["namespaces"] == [{"type": "user"}, {"type": "mount"}]
    assert made["mounts"][:2] == [
        {"destination": "/proc", "type": "none", "source": "/proc", "options": ["rbind"]},
        {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro"]},
    ]


def test_an_image_needs_no_folders_for_mounts(tmp_path):
    """A folder that lacks one is made anew, and what the image has in it is mounted there."""
    image, root = tmp_path / "image", tmp_path / "root"
    (image / "home" / "image_user").mkdir(parents=True)
    (image / "opt" / "data").mkdir(parents=True)
    shown = make_root(root, image, ["/home/me/runs", "/opt/data", "/scratch"])
    assert shown == {"/home/image_user": f"{image}/home/image_user", "/opt": f"{image}/opt"}
    assert (root / "home").is_dir()
    assert not (image / "home" / "me").exists()
    assert make_root(root, image, []).keys() == {"/home", "/opt"}, "again, in the same folder"


@pytest.mark.parametrize("damage", ["missing", "no JSON", "no root"])
def test_an_image_that_is_not_a_bundle_is_refused(container, image, damage):
    if damage == "missing":
        (image / "config.json").unlink()
    elif damage == "no JSON":
        (image / "config.json").write_text("{")
    else:
        (image / "root").rename(image / "elsewhere")
    with pytest.raises(ContainerError, match=r"^cluster.container.image is not a bundle: .*/image.*; unpack the image"):
        container(image=str(image)).enter(["python3"])


def run_words(container, nodes, environ):
    show = "import os; print(*(os.environ[f'SLURM_{name}'] for name in ('PROCID', 'NODEID', 'LOCALID')))"
    words = rank_words({}, container(nodes=nodes), [sys.executable, "-c", show])
    return subprocess.run(words, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


HOST = socket.gethostname()


@pytest.mark.parametrize("name", [HOST, f"{HOST.partition('.')[0]}.cluster"])
def test_a_rank_finds_its_place_by_the_name_of_its_node(container, name):
    """SLURM passes the variables of the batch script, which is task 0."""
    assert Path("/proc/sys/kernel/hostname").read_text().strip() == HOST
    batch = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    done = run_words(container, ("another1", "another2", name), batch)
    assert done.stdout == "2 2 0\n", done.stderr


def test_a_rank_on_an_unknown_node_does_not_begin(container):
    done = run_words(container, ("another1", "another2"), {})
    assert done.returncode == 1
    assert f"{HOST}, is none of the nodes another1 another2" in done.stderr


def test_a_mount_that_the_bundle_has_is_kept(container):
    config = {**CONFIG, "mounts": [{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}]}
    made = bundle_config(config, container(mounts=(Mount("/a", "/a"),)), {})
    assert [one["type"] for one in made["mounts"] if one["destination"] == "/tmp"] == ["tmpfs"]
