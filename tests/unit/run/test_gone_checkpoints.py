from __future__ import annotations

import pytest

from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.checkpoint.retention import move_replaced
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.gone_checkpoints import (
    allow_start_over,
    copy_records_aside,
    describe_gone,
    gone_step,
    may_start_over,
    move_records_aside,
    record_saved,
    recorded_step,
)
from hpctrain.run.ledger import EndFacts, Ledger
from hpctrain.run.reason import Reason
from tests.unit.fakes import manifest


def save(directory, step):
    path = directory.checkpoint(step)
    path.mkdir()
    (path / "manifest.json").write_bytes(manifest(step))
    return path


def attempt(directory, start=None, published=None, ended=None):
    """An attempt's records: the step from which it starts, and what it has saved by its claim and by its end."""
    ledger = Ledger(directory)
    number = ledger.claim()
    if start is not None:
        ledger.start(number, job_id=None, nodes=[], world_size=1, step=start)
    if published is not None:
        record_saved(directory.attempt(number), published)
    if ended is not None:
        ledger.end(number, EndFacts(saved_step=ended), reason=Reason.INTERRUPTED, step=ended)
    return number


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], 0),
        ([{}], 0),
        ([{"start": 0}], 0),
        ([{"start": 0, "published": 40}], 40),  # killed
        ([{"start": 0, "ended": 40}], 40),  # of an earlier version
        ([{"start": 0, "published": 60, "ended": 0}], 60),  # purged before the end
        ([{"start": 0, "ended": 60}, {"start": 40}], 40),  # from an older one
        ([{"start": 0, "ended": 60}, {"start": 60}, {}], 60),
    ],
)
def test_the_newest_attempt_that_trained_decides_what_must_be_there(directory, attempts, expected):
    for records in attempts:
        attempt(directory, **records)
    assert recorded_step(directory) == expected
    assert gone_step(directory) == (expected or None)
    assert bool(describe_gone(directory)) == (expected > 0)
    save(directory, expected)
    assert (gone_step(directory), describe_gone(directory)) == (None, "")


def test_what_retention_removed_and_what_was_set_aside_is_not_gone(directory):
    attempt(directory, start=0, published=60)
    for step in (40, 60):
        save(directory, step)
    assert gone_step(directory) is None
    directory.checkpoint(60).rename(directory.checkpoints / "damaged-step_00000060-0123abcd")
    assert gone_step(directory) is None
    save(directory, 40 + 1).rename(directory.path / "elsewhere")
    directory.set_aside()[0].rename(directory.path / "aside")
    assert (gone_step(directory), describe_gone(directory)) == (60, "")


def test_one_that_made_way_for_a_new_one_that_was_never_published_is_not_gone(directory):
    attempt(directory, start=0, published=60)
    aside = move_replaced(save(directory, 60))
    assert (saved_step(directory), gone_step(directory), describe_gone(directory)) == (60, None, "")
    (aside / "manifest.json").unlink()
    assert describe_gone(directory)


def test_a_checkpoint_with_missing_files_counts_as_gone(directory):
    attempt(directory, start=0, published=60)
    (save(directory, 60) / "manifest.json").unlink()
    text = describe_gone(directory)
    assert text.startswith(f"{directory.checkpoints}: expected the checkpoint of step 60, which the run saved")
    assert f"`python -m hpctrain resume {directory.as_typed} resume.from_scratch=true`" in text


def test_a_programs_saves_are_its_own_affair(directory):
    attempt(directory, start=0, ended=60)
    directory.config.write_text("run:\n  command: [python, train.py]\n")
    assert (recorded_step(directory), describe_gone(directory)) == (0, "")


def test_starting_over_is_allowed_until_an_attempt_has_started(directory):
    number = attempt(directory, start=0, published=60)
    assert not may_start_over(directory)
    allow_start_over(directory, number)
    assert (may_start_over(directory), describe_gone(directory)) == (True, "")
    # one whose ranks never began, as after a node failure
    number = attempt(directory)
    record_end(directory, number, Outcome(Reason.NODE_FAILURE, 0), world_size=1)
    assert (may_start_over(directory), recorded_step(directory)) == (True, 0)
    attempt(directory, start=0)
    assert (may_start_over(directory), recorded_step(directory)) == (False, 0)
    attempt(directory, start=0, published=20)
    assert (may_start_over(directory), recorded_step(directory)) == (False, 20)


def test_a_refused_attempt_changes_nothing(directory):
    attempt(directory, start=0, published=60)
    number = attempt(directory)
    record_end(directory, number, Outcome(Reason.FAILED, 0), world_size=1)
    assert recorded_step(directory) == 60
    refused = Ledger(directory).attempts()[-1]
    assert (refused.start_step, refused.end_step) == (60, 60)


def test_records_are_moved_or_kept_where_the_attempt_has_a_folder(directory):
    (directory.media / "train").mkdir(parents=True)
    for path in (directory.metrics, directory.media_records, directory.media / "train" / "a.png"):
        path.write_text("1\n")
    directory.tensorboard.mkdir()
    folder = copy_records_aside(directory, 2)
    directory.metrics.write_text("")
    (directory.media / "train" / "a.png").unlink()
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "media.jsonl",
        "media/train/a.png",
        "metrics.jsonl",
    ]
    assert (folder / "metrics.jsonl").read_text() == "1\n"
    assert move_records_aside(directory, 3) == directory.earlier / "0003"
    assert sorted(path.name for path in (directory.earlier / "0003").iterdir()) == [
        "media",
        "media.jsonl",
        "metrics.jsonl",
        "tensorboard",
    ]
    assert not any(path.exists() for path in (directory.metrics, directory.media, directory.tensorboard))
