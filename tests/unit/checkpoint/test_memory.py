from __future__ import annotations

import pytest

from hpctrain.checkpoint.memory import available_memory_bytes

KIB = 1024


@pytest.fixture
def machine(tmp_path):
    """Files as the kernel has them: of a machine with 64 KiB free, and a process in the group /slurm/job_1/step_0."""

    def build(membership, files=()):
        proc, groups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text("MemTotal:   100 kB\nMemAvailable:    64 kB\n")
        (proc / "self" / "cgroup").write_text(membership)
        for name, text in dict(files).items():
            path = groups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_memory_bytes(proc, groups)

    return build


def group(path, limit, use, cache=0):
    stat = f"anon {use - cache}\ninactive_file {cache}\nactive_file 0\n"
    return {f"{path}/memory.max": limit, f"{path}/memory.current": str(use), f"{path}/memory.stat": stat}


def test_the_machine_alone(machine):
    assert machine("0::/\n") == 64 * KIB


def test_a_jobs_limit_counts_and_its_page_cache_does_not(machine):
    files = group("slurm/job_1/step_0", "max", 9000) | group("slurm/job_1", "20000", 12000, cache=3000)
    assert machine("0::/slurm/job_1/step_0\n", files) == 20000 - 9000


def test_a_limit_above_what_the_machine_has_left_is_ignored(machine):
    assert machine("0::/slurm\n", group("slurm", str(1 << 40), 100)) == 64 * KIB


def test_version_one_has_other_names(machine):
    folder = "memory/slurm/uid_0/job_1"
    files = {
        f"{folder}/memory.limit_in_bytes": "20000\n",
        f"{folder}/memory.usage_in_bytes": "9000\n",
        f"{folder}/memory.stat": "cache 5\ninactive_file 500\nactive_file 500\n",
    }
    assert machine("5:cpuset:/slurm\n3:memory:/slurm/uid_0/job_1\n0::/\n", files) == 20000 - 8000


def test_what_cannot_be_read_is_unknown(tmp_path):
    assert available_memory_bytes(tmp_path, tmp_path) is None


def test_here():
    assert available_memory_bytes() > 0
