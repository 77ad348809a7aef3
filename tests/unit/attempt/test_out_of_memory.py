from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.attempt.out_of_memory import oom_complaint, oom_kills, with_memory_advice
from hpctrain.attempt.outcome import Outcome
from hpctrain.config.compose import Composer
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.reason import Reason

WORKER = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "
COMPLAINT = "Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("words", "had"),
    [
        (
            ["cluster=slurm", "cluster.memory_gb=2"],
            "raise cluster.memory_gb above 2 (GB per node), use a smaller data.num_workers, or use a smaller",
        ),
        (["cluster=slurm"], "set cluster.memory_gb (it is unset, so each node has SLURM's default), use a smaller"),
        ([], "use a smaller data.num_workers, or use a smaller trainer.micro_batch_size: rank 0 of 1"),
        (["data.num_workers=0", "trainer.micro_batch_size=1"], "use a smaller model: rank 0 of 1"),
    ],
)
def test_a_kill_for_memory_is_headlined_with_what_there_was(words: list[str], had: str) -> None:
    outcome = with_memory_advice(Outcome.from_records({}, 1, 0, COMPLAINT), Composer().compose(words))
    assert outcome.reason is Reason.OUT_OF_MEMORY
    assert outcome.headline.startswith(f"killed by the kernel; {had}")
    assert COMPLAINT in outcome.headline


def record(message: str, rank: int = 0) -> ExitRecord:
    return ExitRecord(rank=rank, host="n1", reason=Reason.INFRASTRUCTURE, step=3, message=message)


def test_a_process_of_a_rank_that_was_killed_for_memory() -> None:
    """A DataLoader worker's end is an error of its rank; what srun prints says why it ended."""
    assert Outcome.from_records({0: record(WORKER)}, 1, 0, COMPLAINT).reason is Reason.OUT_OF_MEMORY
    assert Outcome.from_records({0: record(WORKER)}, 1, 0, "task 0: Killed").reason is Reason.INFRASTRUCTURE


def test_what_a_rank_recorded_outweighs_a_kill_of_another_process() -> None:
    found = record("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    assert Outcome.from_records({0: found}, 1, 0, COMPLAINT).reason is Reason.INFRASTRUCTURE


def test_another_end_is_left_as_it_is() -> None:
    outcome = Outcome.from_records({}, 1, 0, "task 0: Killed")
    assert with_memory_advice(outcome, Composer().compose([])) == outcome


V1 = "9:name=systemd:/\n4:memory:/user/me\n0::/\n"
V2 = "0::/user/me\n"


@pytest.mark.parametrize(
    ("membership", "files", "count"),
    [
        (V2, {"user/me/memory.events": 2, "user/memory.events": 7}, 2),
        (V2, {"memory.events": 3}, 3),
        (V1, {"memory/user/me/memory.oom_control": 4, "memory/memory.oom_control": 7}, 4),
        (V1, {"memory/memory.oom_control": 5}, 5),
        (V2, {}, 0),
        (None, {"memory.events": 3}, 0),
    ],
    ids=["own", "container", "own, version 1", "container, version 1", "no count", "no groups"],
)
def test_the_kernels_count_is_that_of_the_own_group(
    tmp_path: Path, membership: str | None, files: dict[str, int], count: int
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "vmstat").write_text("oom_kill 9\n")
    if membership is not None:
        (tmp_path / "self" / "cgroup").write_text(membership)
    for name, kills in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"max 11\noom_kill {kills}\noom_group_kill 8\n")
    assert oom_kills(tmp_path, tmp_path / "groups") == count


@pytest.mark.parametrize(
    ("codes", "records", "blamed"),
    [
        ([None, -9], {0: record("lost a peer")}, True),
        ([-9, None], {}, True),
        ([1, None], {0: record(WORKER)}, True),
        ([], {}, True),
        ([None, -11], {0: record("lost a peer")}, False),
        ([None, 7], {}, False),
        ([None, None], {0: record("lost a peer")}, False),
        ([-9, 1], {0: record("lost a peer"), 1: record("NCCL error", 1)}, False),
    ],
)
def test_a_kill_in_the_group_is_blamed_if_a_rank_was_killed(
    codes: list[int | None], records: dict[int, ExitRecord], blamed: bool
) -> None:
    assert bool(oom_complaint(oom_kills() - 1, codes, records)) == blamed
    assert not oom_complaint(oom_kills(), codes, records)
