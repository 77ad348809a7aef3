from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.data.shared_memory import clear_left_behind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")

LONG_AGO = 1_600_000_000
DEAD = 2**22 + 1
"""No process has this number (proc(5), pid_max)."""


def left_file(folder: Path, name: str, modified: float = LONG_AGO) -> Path:
    path = folder / name
    path.write_bytes(b"samples")
    os.utime(path, (modified, modified))
    return path


def test_what_nobody_has_open_is_removed(tmp_path: Path) -> None:
    left_file(tmp_path, f"torch_{DEAD}_1230389203_32")
    (tmp_path / f"torch_{DEAD}_1_0").touch()  # killed before it had a size
    os.utime(tmp_path / f"torch_{DEAD}_1_0", (LONG_AGO, LONG_AGO))
    assert sorted(clear_left_behind(tmp_path)) == [f"torch_{DEAD}_1230389203_32", f"torch_{DEAD}_1_0"]
    assert not list(tmp_path.iterdir())


HOLD = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_what_another_process_has_mapped_stays_until_it_is_killed(tmp_path: Path) -> None:
    path = left_file(tmp_path, f"torch_{DEAD}_1230389203_32")
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert clear_left_behind(tmp_path) == []
        holder.kill()
    assert clear_left_behind(tmp_path) == [path.name]


def test_what_is_new_or_of_the_living_or_named_by_others_stays(tmp_path: Path) -> None:
    left_file(tmp_path, f"torch_{DEAD}_2_3", modified=time.time() + 60)
    left_file(tmp_path, f"torch_{os.getpid()}_2_3")
    left_file(tmp_path, "sem.mp-1234")
    left_file(tmp_path, "torch_shm_1_2")
    assert clear_left_behind(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_where_nothing_is_known_of_processes_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    left_file(tmp_path / "shm", f"torch_{DEAD}_1_0")
    assert clear_left_behind(tmp_path / "shm", proc=tmp_path / "not mounted") == []
    assert len(list((tmp_path / "shm").iterdir())) == 1


SHARE = """
import os
import torch
from hpctrain.data.shared_memory import OF_PYTORCH, SHARED_MEMORY, clear_left_behind
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.zeros(1000).share_memory_()
made = [path.name for path in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*")]
print(len(made), [OF_PYTORCH.fullmatch(name) is not None for name in made], set(made).isdisjoint(clear_left_behind()))
"""


def test_pytorch_names_its_files_so() -> None:
    done = subprocess.run([sys.executable, "-c", SHARE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "1 [True] True\n"
