"""Runs whose GPU, or one of whose ranks, does nothing any more: they end as a hang, soon, and leave nothing behind."""

from __future__ import annotations

import time

import pytest

from hpctrain.errors import ExitCode
from tests.gpu.programs.gpu_tasks import FEW_STEPS

pytestmark = pytest.mark.gpu
HANG_TIMEOUT_S, MARGIN_S = 5, 30
WORDS = (
    *FEW_STEPS,
    f"health.hang_timeout_s={HANG_TIMEOUT_S}",
    "health.start_timeout_s=90",
)
TWO = ("cluster.processes_per_node=2", "parallel.backend=gloo")
CASES = {
    "a kernel of ten minutes": ([], "0:3:spin_600"),
    "rank 0 stands still": (TWO, "0:3:stand"),
    "rank 1 stands still": (TWO, "1:3:stand"),
    "rank 1 is stopped": (TWO, "1:3:SIGSTOP"),
}


@pytest.fixture(scope="module")
def ended(shells, at_once):
    """Each case, with the seconds from its beginning to its record, and to the end of the command."""

    def train(name):
        words, act = CASES[name]
        shell = shells(name)
        acted = shell.folder / "acted"
        shell.train(*WORDS, *words, code=ExitCode.FAILED, TRIAL_ACT=act, TRIAL_ACTED=str(acted))
        gone, began = time.time(), acted.stat().st_mtime
        return shell, shell.last_line["time"] - began, gone - began

    return dict(zip(CASES, at_once(train, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_hang_within_the_bound_and_no_process_is_left(ended, name):
    shell, recorded_s, gone_s = ended[name]
    assert shell.last_line["reason"] == "hang"
    assert shell.last_line["step"] == 2
    # the bound counts from the end of step 2
    assert HANG_TIMEOUT_S - 1 < recorded_s <= gone_s < HANG_TIMEOUT_S + MARGIN_S
    assert shell.processes == []


def test_a_rank_alone_records_where_it_waits_for_the_gpu(ended):
    shell, _, _ = ended["a kernel of ten minutes"]
    expected = f"no step for {HANG_TIMEOUT_S} s (health.hang_timeout_s); it was at "
    assert expected in shell.last_line["detail"]
    assert str(shell.exit_records[0].reason) == "hang"
    assert shell.run.stacks(1, 0).read_text().count("==== end") == 1


@pytest.mark.parametrize("name", ["rank 0 stands still", "rank 1 stands still"])
def test_the_rank_that_stands_still_is_named(ended, name):
    shell, _, _ = ended[name]
    rank = int(name.split()[1])
    assert shell.last_line["detail"].startswith(f"rank {rank} on ")
    assert f"rank {1 - rank} waited for others" in shell.last_line["detail"]
    assert {rank: record.blames_peer for rank, record in shell.exit_records.items()} == {rank: False, 1 - rank: True}


def test_a_rank_that_is_stopped_is_named_by_the_other(ended):
    shell, _, _ = ended["rank 1 is stopped"]
    assert "; rank 1 left no exit record: stopped, its machine gone" in shell.last_line["detail"]
    assert "rank 0 waited for others" in shell.last_line["detail"]


def test_the_gpu_can_be_used_after_a_kernel_that_hung(ended):
    shell, _, _ = ended["a kernel of ten minutes"]
    shell.train(*WORDS)
    assert shell.inspected["step"] == 14
    assert shell.attempts[-1].start_step >= 1
