"""Asking for runs: each is given once, the best continue, and what was interrupted is continued."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpctrain.config.sweep import KINDS, SEARCHES
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.code import CodeSnapshot, describe_file, digest_of, list_of, record_code, write_files
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.algorithm import SearchAlgorithm
from hpctrain.search.journal import JournalEvent, SearchDecision, read_journal
from hpctrain.search.search import ALGORITHMS, drawn_run, is_stopped, train_assigned
from tests.support.searching import asha, prepared, record_of, train


def place(begin: SearchDecision | None) -> tuple[int, int] | None:
    """The run and the rung, which stay the same for another task."""
    return None if begin is None else (begin.run, begin.rung)


def test_each_kind_of_sweep_has_an_algorithm_and_searches_are_those_whose_tasks_ask() -> None:
    assert ALGORITHMS.keys() == KINDS.keys()
    assert {kind for kind in KINDS if issubclass(ALGORITHMS[kind], SearchAlgorithm)} == SEARCHES


def test_every_task_gets_a_run_of_its_own(tmp_path: Path) -> None:
    home = prepared(tmp_path, 3)
    given = [asha(home).ask(f"7_{task}") for task in range(4)]
    assert [one.run if one else None for one in given] == [0, 1, 2, None]
    assert given[0] is not None
    assert (given[0].rung, asha(home).algorithm.pause_at_step(0)) == (0, 10)


def test_a_requeued_task_continues_its_run(tmp_path: Path) -> None:
    home = prepared(tmp_path, 3)
    before = asha(home).ask("7_0")
    assert asha(home).ask("7_1") != before
    assert asha(home).ask("7_0") == before


def test_a_requeued_task_leaves_a_run_that_another_continues_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared(tmp_path, 3)
    given = [asha(home).ask(f"7_{task}") for task in range(3)]
    for task, value in [(0, 0.2), (2, 0.5), (1, 0.9)]:
        asha(home).state()  # records the ends so far
        train(asha(home), given[task], value)
    attempts = Ledger.attempts

    def continued_before_they_are_read(ledger: Ledger) -> list[Attempt]:
        # the requeued task has read the journal; before it reads the ledgers, another task continues its run
        monkeypatch.setattr(Ledger, "attempts", attempts)
        promoted = asha(home).ask("7_9")
        assert promoted is not None
        assert (promoted.run, promoted.rung) == (1, 1)
        Ledger(RunDirectory.at(home.path / "1")).claim()
        return ledger.attempts()

    monkeypatch.setattr(Ledger, "attempts", continued_before_they_are_read)
    assert asha(home).ask("7_1") is None


def test_a_task_whose_paused_run_another_one_continues_asks_again(
    many: list[RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    home = RunDirectory.at(many[0].path.parent)
    search = asha(home)
    record_of(home, "asha", num_runs=3, min_steps=10, reduction_factor=3).write(home, 0o750)

    def pause(plan: RunPlan) -> tuple[int, bool]:
        run = int(plan.directory.path.name)
        train(search, SearchDecision(event=JournalEvent.BEGIN, run=run), run / 10)
        if run == 2:  # the best of the three, which another task takes before this one has looked
            promoted = asha(home).ask("7_9")
            assert promoted is not None
            assert (promoted.run, promoted.rung) == (2, 1)
        return ExitCode.INTERRUPTED, False

    assert train_assigned(home, "7_1", pause, max_new_runs=None) == ExitCode.FINISHED
    assert capsys.readouterr().out.endswith("run 2 paused at step 10: eval/accuracy 0.2\n")


def test_a_task_begins_one_run_and_continues_the_best(tmp_path: Path) -> None:
    home = prepared(tmp_path, 4)
    search = asha(home)
    for task, value in enumerate([0.2, 0.9, 0.5]):
        begin = search.ask(f"7_{task}")
        assert begin is not None
        train(search, begin, value)
    # the next task that asks finds the end of all three, and the best one continues before a new run begins
    promoted = search.ask("7_2")
    assert promoted is not None
    assert (promoted.run, promoted.rung, search.algorithm.pause_at_step(1)) == (1, 1, 30)
    other = asha(home).ask("7_3")
    assert other is not None
    assert (other.run, other.rung) == (3, 0)
    train(search, promoted, 0.95, reason=Reason.COMPLETED)
    assert search.ask("7_2") is None
    ends = [(one.run, one.rung, one.value, one.reason) for one in read_journal(home) if one.event == "end"]
    assert ends == [(0, 0, 0.2, "paused"), (1, 0, 0.9, "paused"), (2, 0, 0.5, "paused"), (1, 1, 0.95, "completed")]


def test_one_process_may_begin_all_runs(tmp_path: Path) -> None:
    search = asha(prepared(tmp_path, 9))
    order = []
    while (begin := search.ask("here:1", max_new_runs=None)) is not None:
        order.append((begin.run, begin.rung))
        train(
            search,
            begin,
            1 - begin.run / 10,
            reason=Reason.COMPLETED if begin.rung == 2 else Reason.PAUSED,
        )
    assert order == [
        *((0, 0), (1, 0), (2, 0), (0, 1)),
        *((3, 0), (4, 0), (5, 0), (1, 1)),
        *((6, 0), (7, 0), (8, 0), (2, 1), (0, 2)),
    ]


def test_a_run_is_continued_by_another_task_once_it_is_released(tmp_path: Path) -> None:
    home = prepared(tmp_path, 1)
    search = asha(home)
    first = search.ask("7_0")
    assert search.ask("7_1") is None
    search.release([*search.state().active.values()])
    assert place(asha(home).ask("8_0")) == place(first) == (0, 0)


def test_a_released_run_that_was_killed_comes_after_a_new_one(tmp_path: Path) -> None:
    search = asha(prepared(tmp_path, 2))
    killed = search.ask("here:1")
    Ledger(search.directory(0)).claim()
    search.release([*search.state().active.values()])
    new = search.ask("here:2", max_new_runs=None)
    assert new is not None
    assert new.run == 1
    assert place(search.ask("here:3", max_new_runs=None)) == place(killed) == (0, 0)


def test_a_run_is_released_only_as_long_as_nothing_else_was_decided(tmp_path: Path) -> None:
    home = prepared(tmp_path, 2)
    mine, other = asha(home), asha(home)
    first = mine.ask("7_0")
    second = mine.ask("7_1")
    assert first is not None
    assert second is not None
    seen = [*mine.state().active.values()]
    # another process has released the first run, and a task has it again; the second one has ended meanwhile
    other.release([one for one in seen if one.run == 0])
    assert place(other.ask("8_0")) == place(first)
    train(other, second, 0.5)
    mine.release(seen)
    assert asha(home).ask("9_0") is None
    assert list(asha(home).state().ends) == [(1, 0)]


@pytest.mark.parametrize("reason", [Reason.FAILED, Reason.CANCELLED])
def test_a_run_that_failed_is_over_until_it_is_released(tmp_path: Path, reason: Reason) -> None:
    search = asha(prepared(tmp_path, 1))
    begin = search.ask("7_0")
    assert begin is not None
    train(search, begin, 0.5, reason=reason)
    assert search.ask("7_0") is None
    (end,) = search.state().ends.values()
    assert (end.value, end.reason) == (None, reason.value)
    search.release([*search.state().ends.values()])
    again = search.ask("8_0")
    assert again is not None
    assert place(again) == place(begin)
    train(search, again, 0.7)
    assert search.state().ends[0, 0].value == 0.7


def test_an_interrupted_run_stays_with_its_task(tmp_path: Path) -> None:
    search = asha(prepared(tmp_path, 1))
    begin = search.ask("7_0")
    assert begin is not None
    train(search, begin, 0.5, reason=Reason.PREEMPTED)
    assert search.ask("7_1") is None
    assert search.ask("7_0") == begin
    # the attempt that is running now has no end yet
    Ledger(search.directory(0)).claim()
    assert search.ask("7_0") == begin


def test_nothing_begins_after_the_deadline(tmp_path: Path) -> None:
    now = [100.0]
    search = asha(prepared(tmp_path, 6), deadline=200.0, clock=lambda: now[0])
    for task in range(3):
        begin = search.ask(f"7_{task}")
        assert begin is not None
        if task < 2:
            train(search, begin, 0.1)
    now[0] = 201.0
    assert search.ask("7_3") is None
    # what was begun goes on
    assert search.ask("7_2") == begin


def test_a_run_with_damaged_records_stops_no_other(tmp_path: Path) -> None:
    search = asha(prepared(tmp_path, 2))
    begin = search.ask("7_0")
    assert begin is not None
    train(search, begin, 0.5)
    (search.directory(0).path / "attempts.jsonl").write_text('{"event": "end", "attempt": 1, "step": "many"}\n')
    other = search.ask("7_1")
    assert other is not None
    assert other.run == 1
    # nor the other runs of a grid on this machine, when it has completed
    assert not is_stopped(search.directory(0), 0)


def test_a_run_that_failed_on_its_way_to_the_end_is_not_begun_again(tmp_path: Path) -> None:
    search = asha(prepared(tmp_path, 2))
    order = []
    while len(order) < 9 and (begin := search.ask("here:1", max_new_runs=None)) is not None:
        order.append((begin.run, begin.rung))
        train(search, begin, begin.run / 10, reason=Reason.FAILED if begin.rung else Reason.PAUSED)
    # the better one is trained to its end, then what is left
    assert order == [(0, 0), (1, 0), (1, 1), (0, 1)]


def test_the_best_run_of_a_small_search_is_trained_to_its_end(tmp_path: Path) -> None:
    search = asha(prepared(tmp_path, 2))
    order = []
    while (begin := search.ask("here:1", max_new_runs=None)) is not None:
        order.append((begin.run, begin.rung))
        train(search, begin, begin.run / 10, reason=Reason.COMPLETED if begin.rung == 2 else Reason.PAUSED)
    # one in three of two runs is none, so none would have continued
    assert order == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_a_run_that_is_still_being_prepared_is_not_given_to_a_task(tmp_path: Path) -> None:
    search = asha(prepared(tmp_path, 1))
    (tmp_path / "1").mkdir()
    assert search.ask("7_0") is not None
    assert search.ask("7_1") is None


def test_what_a_group_shares_it_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    before = os.umask(0o077)
    try:
        search = asha(prepared(tmp_path, 1))
        (tmp_path / "search").rmdir()
        search.create()
        assert search.ask("7_0") is not None
    finally:
        os.umask(before)
    (decision,) = (tmp_path / "search").iterdir()
    assert stat.S_IMODE(decision.stat().st_mode) == 0o660
    assert stat.S_IMODE((tmp_path / "search").stat().st_mode) & 0o770 == 0o770


def optuna(folder: Path, *fixed: str) -> SweepRecord:
    space = {"optimizer.lr": "interval(1e-4,1e-1)"}
    return SweepRecord(kind="optuna", space=space, fixed=[*fixed], folder=str(folder), submitted=0.0, command=())


DRAWN = {"params": {"optimizer.lr": 0.01}}


def test_what_all_runs_share_is_not_varied_however_it_was_typed(tmp_path: Path) -> None:
    record = optuna(tmp_path, "+optimizer.amsgrad=true", "trainer.max_steps=1")
    run = drawn_run(RunDirectory.at(tmp_path), record, DRAWN)
    assert list(run.varied) == ["optimizer.lr"]


def test_values_are_typed_exactly(tmp_path: Path) -> None:
    drawn = {"params": {"optimizer.lr": 0.00012345678901234567, "trainer.max_steps": 3, "optimizer": "sgd"}}
    run = drawn_run(RunDirectory.at(tmp_path), optuna(tmp_path), drawn)
    assert run.varied == {"optimizer.lr": "0.00012345678901234567", "trainer.max_steps": "3", "optimizer": "sgd"}


def test_code_that_was_purged_is_not_taken_for_values_that_do_not_fit(tmp_path: Path) -> None:
    home = RunDirectory.at(tmp_path / "sweep")
    folder = home.code / "d1"
    folder.mkdir(parents=True)
    for name in ("mine.py", "other.py"):
        (folder / name).write_text("x = 1\n")
    files = [describe_file(folder / name, name) for name in ("mine.py", "other.py")]
    digest = digest_of(files)
    write_files(list_of(home.code / digest), files)
    code = CodeSnapshot(run=home, digest=digest, folder=folder.rename(home.code / digest), root=tmp_path, place=".")
    record_code(home, code, 1.0)
    (code.folder / "mine.py").write_text("changed")  # the launcher of each attempt compares contents, and names it
    assert drawn_run(home, optuna(tmp_path), DRAWN).varied
    for name in ("mine.py", "other.py"):
        (code.folder / name).unlink()
    with pytest.raises(RunDirectoryError, match=r"2 of 2 files were removed .*\(mine\.py, other\.py\): restore them"):
        drawn_run(home, optuna(tmp_path, "task=custom", "task._target_=mine.Mine"), DRAWN)
