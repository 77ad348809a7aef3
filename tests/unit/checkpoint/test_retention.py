from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.read import load_newest
from hpctrain.checkpoint.retention import (
    Retention,
    discard_replaced,
    holds_only_our_files,
    move_replaced,
    quarantine,
    remove_checkpoint,
    remove_leftovers,
    steps_to_remove,
)
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import SupersededError
from hpctrain.rank.world import World
from hpctrain.run.checkpoint_manifest import MANIFEST
from hpctrain.run.checkpoints import CheckpointInfo, find_damage, list_checkpoints, saved_step
from hpctrain.run.evaluation import Score

ALONE = World(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))


def info(step, *, intact=True, ours=True, score=None):
    return CheckpointInfo(
        step=step,
        path=Path(f"step_{step:08d}"),
        intact=intact and ours,
        problem="" if intact and ours else "damaged",
        weights_digest="d" if ours else None,
        score=None if score is None else Score("accuracy", "max", score),
    )


@st.composite
def findings(draw):
    steps = draw(st.lists(st.integers(0, 60), unique=True, max_size=12))
    return [
        info(
            step,
            intact=draw(st.booleans()),
            ours=draw(st.integers(0, 4)) > 0,
            score=draw(st.none() | st.sampled_from([0.1, 0.5, 0.9])),
        )
        for step in steps
    ]


@settings(deadline=None)
@given(findings(), st.integers(2, 5), st.none() | st.integers(1, 20), st.integers(0, 4))
def test_what_every_policy_must_hold(found, keep, keep_every, keep_best):
    policy = Checkpoint(keep=keep, keep_every=keep_every, keep_best=keep_best)
    removed = steps_to_remove(found, policy)
    by_step = {item.step: item for item in found}
    intact = sorted(item.step for item in found if item.intact)
    left = [step for step in intact if step not in removed]
    assert removed == sorted(set(removed) & set(by_step))
    assert set(intact[-2:]) <= set(left)
    assert set(intact[len(intact) - min(keep, len(intact)) :]) <= set(left)
    assert all(by_step[step].weights_digest is not None for step in removed)
    if keep_every:
        assert not [step for step in removed if step % keep_every == 0 and by_step[step].intact]
        left = [step for step in left if step % keep_every]
    ranked = sorted((-by_step[step].score.value, step) for step in intact if by_step[step].score)
    best = {step for _, step in ranked[:keep_best]}
    assert not best & set(removed)
    assert len(set(left) - best) <= keep
    assert steps_to_remove([item for item in found if item.step not in removed], policy) == []


@pytest.mark.parametrize(
    ("found", "keep", "keep_every", "removed"),
    [
        ([], 3, None, []),
        ([info(1), info(2), info(3)], 2, None, [1]),
        ([info(3), info(1), info(2)], 2, None, [1]),
        ([info(1), info(2), info(3), info(4)], 3, 1, []),
        ([info(10), info(15), info(20), info(25), info(30)], 2, 20, [10, 15]),
        ([info(1), info(2, intact=False), info(3)], 2, None, []),
        ([info(1), info(2), info(3, intact=False)], 2, None, []),
        ([info(1, intact=False), info(2), info(3)], 9, None, [1]),
        ([info(1, ours=False), info(2), info(3)], 2, None, []),
    ],
)
def test_examples(found, keep, keep_every, removed):
    assert steps_to_remove(found, Checkpoint(keep=keep, keep_every=keep_every)) == removed


@pytest.mark.parametrize(
    ("scores", "keep_best", "removed"),
    [
        ([0.9, 0.5, 0.7, 0.6], 1, [2]),
        ([0.9, 0.5, 0.7, 0.6], 0, [1, 2]),
        ([0.5, 0.5, 0.4, 0.4], 1, [2]),  # of equal ones the earlier
        ([None, 0.1, None, None], 1, [1]),
        ([0.9, 0.8, None, None], 3, []),
    ],
)
def test_the_best_stay(scores, keep_best, removed):
    found = [info(step, score=score) for step, score in enumerate(scores, 1)]
    assert steps_to_remove(found, Checkpoint(keep_best=keep_best)) == removed


def test_a_damaged_one_is_none_of_the_best():
    found = [info(1, score=0.8), info(2, score=0.9, intact=False), info(3), info(4)]
    assert steps_to_remove(found, Checkpoint(keep_best=1)) == [2]


def names(directory):
    return sorted(path.name for path in directory.checkpoints.iterdir())


def test_a_checkpoint_goes_whole(directory, writer, snapshot):
    path = writer.write(snapshot(1))
    remove_checkpoint(path)
    assert names(directory) == []


def test_a_file_that_a_user_added_keeps_it(directory, writer, snapshot):
    path = writer.write(snapshot(1))
    (path / "notes.txt").write_text("mine")
    remove_checkpoint(path)
    assert find_damage(path) == ""
    assert (path / "notes.txt").read_text() == "mine"


def test_a_link_and_a_foreign_directory_aren_t_ours(directory, writer, snapshot, tmp_path):
    elsewhere = writer.write(snapshot(1)).rename(tmp_path / "elsewhere")
    link = directory.checkpoint(1)
    link.symlink_to(elsewhere)
    foreign = directory.checkpoint(2)
    foreign.mkdir()
    for path in (link, foreign):
        remove_checkpoint(path)
    assert find_damage(link) == ""
    assert foreign.exists()


def test_what_a_network_file_system_left_in_it_doesn_t_keep_it(writer, snapshot):
    path = writer.write(snapshot(1))
    (path / ".nfs0001").write_text("")
    assert holds_only_our_files(path)


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
    aside = move_replaced(path)
    assert not path.exists()
    assert remove_leftovers(directory) == [aside.name]
    assert find_damage(path) == ""
    assert names(directory) == ["step_00000001"]


def test_one_that_was_replaced_is_removed(directory, writer, snapshot):
    move_replaced(writer.write(snapshot(1)))
    path = writer.write(snapshot(1))
    remove_leftovers(directory)
    assert names(directory) == ["step_00000001"]
    assert find_damage(path) == ""


@pytest.mark.parametrize("spoil", [lambda path: (path / MANIFEST).unlink(), lambda path: (path / "mine").touch()])
def test_what_was_in_the_way_and_isn_t_ours_is_kept_by_another_name(directory, writer, snapshot, spoil, caplog):
    path = writer.write(snapshot(1))
    spoil(path)
    discard_replaced(move_replaced(path))
    (kept,) = directory.checkpoints.iterdir()
    assert kept.name.startswith("replaced-step_00000001-")
    assert (kept / "model.pt").exists()
    assert str(kept) in caplog.text
    assert directory.checkpoint_steps() == []
    assert remove_leftovers(directory) == []


@pytest.fixture
def save(directory, writer, snapshot, claim):
    """Write the checkpoint of a step, and remove by a policy what is no longer kept."""

    def write(step, retention=None):
        writer.write(snapshot(step))
        (retention or Retention(directory, claim, Checkpoint())).apply(step)

    return write


def steps(directory):
    return [info.step for info in list_checkpoints(directory) if info.intact]


def test_old_ones_are_removed_once_newer_ones_are_there(directory, writer, snapshot, claim, save):
    retention = Retention(directory, claim, Checkpoint(keep_every=4))
    for step in range(1, 8):
        save(step, retention)
    assert steps(directory) == [4, 6, 7]
    writer.write(snapshot(8))
    assert steps(directory) == [4, 6, 7, 8]
    assert names(directory) == [f"step_{step:08d}" for step in (4, 6, 7, 8)]


def test_the_last_two_intact_stay_though_one_between_was_damaged_in_silence(directory, claim, save, caplog):
    retention = Retention(directory, claim, Checkpoint())
    save(1, retention)
    save(2, retention)
    file = directory.checkpoint(2) / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    save(3, retention)
    assert steps(directory) == [1, 3]
    assert "step_00000002 is not intact (model.pt doesn't match its checksum" in caplog.text
    save(4, retention)
    assert names(directory) == ["step_00000003", "step_00000004"]


def test_a_superseded_attempt_removes_nothing(directory, writer, snapshot, claim):
    for step in (1, 2, 3, 4):
        writer.write(snapshot(step))
    claim.ledger.claim()
    with pytest.raises(SupersededError):
        Retention(directory, claim, Checkpoint()).apply(4)
    assert steps(directory) == [1, 2, 3, 4]


def test_removal_that_fails_is_a_warning(directory, save, monkeypatch, caplog):
    save(1)
    save(2)
    unlink = os.unlink

    def refuse(path, **kwargs):
        if not str(path).startswith("/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    save(3)
    monkeypatch.undo()
    assert "old checkpoints can't be removed" in caplog.text
    assert steps(directory) == [2, 3]
    assert [name[:26] for name in remove_leftovers(directory)] == [".tmp-removed-step_00000001"]
    assert names(directory) == ["step_00000002", "step_00000003"]


def damage(path, how="flip"):
    file = path / "model.pt"
    if how == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "manifest":
        (path / MANIFEST).write_text("{")
    else:
        file.unlink()


@pytest.mark.parametrize("how", ["flip", "manifest", "missing"])
def test_a_damaged_one_that_a_resume_passes_over_is_set_aside_and_no_longer_counts(
    directory, writer, snapshot, claim, how, caplog
):
    writer.write(snapshot(200))
    damage(writer.write(snapshot(240)), how)
    found = load_newest(directory, ALONE)
    quarantine(found.passed_over, claim)
    assert (found.step, saved_step(directory), directory.checkpoint_steps()) == (200, 200, [200])
    (aside,) = directory.set_aside()
    assert (aside / "state.pt").exists()
    assert f"set aside as {aside.name}" in caplog.text
    # the same step can be saved again
    writer.write(snapshot(240))
    assert saved_step(directory) == 240


def test_one_that_could_not_be_read_stays_where_it_is(directory, writer, snapshot, claim):
    """A file system that fails for a while, or a checkpoint of a later hpctrain, is no damage."""
    for why in ("unreadable", "other_version"):
        path = writer.write(snapshot(1))
        info = CheckpointInfo(step=1, path=path, intact=False, problem=why, **{why: True})
        quarantine([info], claim)
        assert directory.set_aside() == []


def test_a_superseded_attempt_sets_nothing_aside(directory, writer, snapshot, claim):
    writer.write(snapshot(1))
    damage(writer.write(snapshot(2)))
    found = load_newest(directory, ALONE)
    claim.ledger.claim()
    with pytest.raises(SupersededError):
        quarantine(found.passed_over, claim)
    assert directory.checkpoint_steps() == [1, 2]


def test_the_newest_two_that_were_set_aside_are_kept_and_what_a_user_put_there(
    directory, writer, snapshot, claim, save
):
    save(1)
    for step in (5, 2, 4, 3, 6):
        damage(writer.write(snapshot(step)), "manifest" if step == 4 else "flip")
        quarantine(load_newest(directory, ALONE).passed_over, claim)
    (directory.set_aside()[1] / "notes.txt").write_text("mine")
    save(7)
    assert [path.name[:21] for path in directory.set_aside()] == [f"damaged-step_{step:08d}" for step in (3, 5, 6)]
    assert steps(directory) == [1, 7]
