"""The journal of a search: complete or absent decisions, numbered without gaps."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpctrain.run.directory import RunDirectory
from hpctrain.search.journal import Journal, JournalEvent, SearchDecision, read_journal

BEGIN = SearchDecision(
    event=JournalEvent.BEGIN, run=3, task="12_3", claims_before=0, time=5.0, drawn={"params": {"optimizer.lr": 0.1}}
)
END = SearchDecision(
    event=JournalEvent.END, run=3, rung=1, step=30, value=0.0, metric="accuracy", mode="max", reason="paused", time=6.5
)


def journal(folder: Path) -> Journal:
    (folder / "search").mkdir(exist_ok=True)
    return Journal(RunDirectory.at(folder))


def test_what_is_published_is_read_by_others(tmp_path: Path) -> None:
    writer, reader = journal(tmp_path), journal(tmp_path)
    assert writer.publish(BEGIN)
    reader.read()
    assert writer.publish(END)
    reader.read()
    assert reader.decisions == writer.decisions == [BEGIN, END]
    assert read_journal(RunDirectory.at(tmp_path)) == [BEGIN, END]
    assert sorted(path.name for path in (tmp_path / "search").iterdir()) == ["000001.json", "000002.json"]


def test_the_second_of_two_processes_has_to_read_first(tmp_path: Path) -> None:
    first, second = journal(tmp_path), journal(tmp_path)
    assert first.publish(BEGIN)
    assert not second.publish(END)
    assert second.decisions == []
    second.read()
    assert second.publish(END)
    assert read_journal(RunDirectory.at(tmp_path)) == [BEGIN, END]
    assert len(list((tmp_path / "search").iterdir())) == 2


def test_a_damaged_decision_keeps_its_number(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    for decision in (BEGIN, END, BEGIN):
        assert writer.publish(decision)
    (tmp_path / "search" / "000001.json").write_text('{"event": "begin", "ru')
    (tmp_path / "search" / "000002.json").unlink()
    late = journal(tmp_path)
    late.read()
    assert late.decisions == [None, None, BEGIN]
    assert late.publish(END)
    assert (tmp_path / "search" / "000004.json").exists()


def test_fields_that_cannot_be_make_no_decision(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    folder.mkdir()
    for number, text in enumerate(
        [
            '{"event": "begin", "run": -1, "rung": 0, "time": 1}',
            '{"event": "other", "run": 1, "rung": 0, "time": 1}',
            "[]",
        ],
        1,
    ):
        (folder / f"{number:06d}.json").write_text(text)
    (folder / "000004.json").write_text('{"event": "end", "run": 1, "rung": 0, "time": 1, "value": NaN, "mode": "up"}')
    assert read_journal(RunDirectory.at(tmp_path)) == [SearchDecision(event=JournalEvent.END, run=1, time=1.0)]


def test_what_is_not_the_journals_neither_stops_nor_blocks_it(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    assert writer.publish(BEGIN)
    folder = tmp_path / "search"
    for name in ("99999999.json", "9.json", "٠٠٠٠٠٩.json", "000900.txt", "000003.json.tmp"):
        (folder / name).write_text(json.dumps(BEGIN.as_record()))
    (folder / "000002.json").symlink_to("nothing")
    os.mkfifo(folder / "000003.json")
    (folder / "000004.json").mkdir()
    for number, changed in ((5, {"event": []}), (6, {"rung": 2**62}), (7, {"run": 2**62}), (8, {"mode": {}})):
        (folder / f"{number:06d}.json").write_text(json.dumps(BEGIN.as_record() | changed))
    late = journal(tmp_path)
    late.read()
    assert late.decisions == [BEGIN, *[None] * 6, BEGIN]
    assert late.publish(END)
    assert (folder / "000009.json").exists()
    assert read_journal(RunDirectory.at(tmp_path)) == [BEGIN, BEGIN, END]


def test_a_sweep_without_a_search_has_no_decisions(tmp_path: Path) -> None:
    assert read_journal(RunDirectory.at(tmp_path)) == []
