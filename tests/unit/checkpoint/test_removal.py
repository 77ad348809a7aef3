from __future__ import annotations

import pytest

from hpctrain.checkpoint.removal import discard_replaced, is_ours, move_aside, remove_checkpoint, remove_leftovers
from hpctrain.run.checkpoints import MANIFEST, verify


def names(directory):
    return sorted(path.name for path in directory.checkpoints.iterdir())


def test_a_checkpoint_goes_whole(directory, writer, snapshot):
    path = writer.write(snapshot(1))
    assert remove_checkpoint(path)
    assert names(directory) == []


def test_what_somebody_added_to_keeps_it(directory, writer, snapshot):
    path = writer.write(snapshot(1))
    (path / "notes.txt").write_text("mine")
    assert not remove_checkpoint(path)
    assert verify(path) == ""
    assert (path / "notes.txt").read_text() == "mine"


def test_a_link_and_a_foreign_directory_aren_t_ours(directory, writer, snapshot, tmp_path):
    elsewhere = writer.write(snapshot(1)).rename(tmp_path / "elsewhere")
    link = directory.checkpoint(1)
    link.symlink_to(elsewhere)
    foreign = directory.checkpoint(2)
    foreign.mkdir()
    assert [remove_checkpoint(path) for path in (link, foreign)] == [False, False]
    assert verify(link) == ""


def test_what_a_network_file_system_left_in_it_doesn_t_keep_it(writer, snapshot):
    path = writer.write(snapshot(1))
    (path / ".nfs0001").write_text("")
    assert is_ours(path)


LEFT = (
    ".tmp-step_00000003-0123abcd",
    ".tmp-removed-step_00000004-0123abcd",
    ".tmp-step_123456789-0123abcd",
)
NOT_OURS = (
    "notes",
    "step_00000009",
    ".tmp-mine",
    ".tmp-step_00000003-0123abcd.bak",
    ".tmp-step_3-0123abcd",
    ".tmp-other-step_00000003-0123abcd",
)


def test_leftovers_go_by_their_names_alone(directory):
    for name in LEFT + NOT_OURS:
        (directory.checkpoints / name).mkdir()
        (directory.checkpoints / name / "model.pt").write_bytes(b"half")
    (directory.checkpoints / ".tmp-step_00000008-0123abcd").symlink_to("notes")
    assert remove_leftovers(directory) == sorted(LEFT)
    assert names(directory) == sorted([*NOT_OURS, ".tmp-step_00000008-0123abcd"])


def test_nothing_to_clean_before_the_first_checkpoint(directory):
    assert remove_leftovers(directory) == []
    directory.checkpoints.rmdir()
    assert remove_leftovers(directory) == []


def test_one_that_made_way_for_nothing_is_put_back(directory, writer, snapshot):
    path = writer.write(snapshot(1))
    aside = move_aside(path)
    assert not path.exists()
    assert remove_leftovers(directory) == [aside.name]
    assert verify(path) == ""
    assert names(directory) == ["step_00000001"]


def test_one_that_was_replaced_is_removed(directory, writer, snapshot):
    move_aside(writer.write(snapshot(1)))
    path = writer.write(snapshot(1))
    remove_leftovers(directory)
    assert names(directory) == ["step_00000001"]
    assert verify(path) == ""


@pytest.mark.parametrize("spoil", [lambda path: (path / MANIFEST).unlink(), lambda path: (path / "mine").touch()])
def test_what_was_in_the_way_and_isn_t_ours_is_kept_by_another_name(directory, writer, snapshot, spoil, caplog):
    path = writer.write(snapshot(1))
    spoil(path)
    discard_replaced(move_aside(path))
    (kept,) = directory.checkpoints.iterdir()
    assert kept.name.startswith("replaced-step_00000001-")
    assert (kept / "model.pt").exists()
    assert str(kept) in caplog.text
    assert directory.checkpoint_steps() == []
    assert remove_leftovers(directory) == []
