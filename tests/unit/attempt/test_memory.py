from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.attempt.memory import oom_kills, with_memory
from hpctrain.attempt.outcome import Outcome
from hpctrain.config.compose import Composer
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.reason import Reason

COMPLAINT = "Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("words", "had"),
    [
        (
            ["cluster=slurm", "cluster.memory_gb=2"],
            "cluster.memory_gb=2 was requested for each node: raise it, or use fewer",
        ),
        (["cluster=slurm"], "cluster.memory_gb isn't set, so a node had SLURM's default: set it, or use fewer"),
        ([], "use fewer data.num_workers or a smaller trainer.micro_batch_size: rank 0 of 1"),
        (["data.num_workers=0", "trainer.micro_batch_size=1"], "use a smaller model: rank 0 of 1"),
    ],
)
def test_a_kill_for_memory_is_headlined_with_what_there_was(words: list[str], had: str) -> None:
    outcome = with_memory(Outcome.from_records({}, 1, 0, COMPLAINT), Composer().compose(words))
    assert outcome.reason is Reason.OUT_OF_MEMORY
    assert outcome.headline.startswith(f"killed for memory; {had}")
    assert COMPLAINT in outcome.headline


def test_a_process_of_a_rank_that_was_killed_for_memory() -> None:
    """A DataLoader worker's end is an error of its rank; what srun prints says why it ended."""
    record = ExitRecord(rank=0, host="n1", reason=Reason.INFRASTRUCTURE, step=3, message="RuntimeError: DataLoader")
    assert Outcome.from_records({0: record}, 1, 0, COMPLAINT).reason is Reason.OUT_OF_MEMORY
    assert Outcome.from_records({0: record}, 1, 0, "task 0: Killed").reason is Reason.INFRASTRUCTURE


def test_another_end_is_left_as_it_is() -> None:
    outcome = Outcome.from_records({}, 1, 0, "task 0: Killed")
    assert with_memory(outcome, Composer().compose([])) == outcome


def test_the_kernels_count(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\noom_kill_x 9\n")
    assert oom_kills(tmp_path / "vmstat") == 3
    assert oom_kills(tmp_path / "absent") == 0
