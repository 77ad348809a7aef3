from __future__ import annotations

import json

import pytest

from hpctrain.metrics.media_files import MediaFiles, MediaWriter
from hpctrain.tasks.position import Position
from hpctrain.train.task_log import AttachedLog


@pytest.fixture
def position():
    return Position()


@pytest.fixture
def log(position):
    return AttachedLog("Plain", position, total_steps=10, every_steps=3)


@pytest.fixture
def written(log, tmp_path):
    """What is written of the media that the function in the argument logs during a training."""

    def during(function):
        writer = MediaWriter(MediaFiles(tmp_path / "media", tmp_path / "media.jsonl", 0))
        with log.training(writer):
            function()
        writer.close()
        records = [json.loads(line) for line in (tmp_path / "media.jsonl").read_text().splitlines()]
        return [(record["step"], record["name"], (tmp_path / record["file"]).read_text()) for record in records]

    return during


def test_an_abandoned_evaluation_drops_no_media_of_the_training(log, written):
    def train():
        log.text("note", "of the step")
        with log.evaluation_mode():
            log.text("note", "of the evaluation")
        log.media.drop()
        log.media.release()

    assert written(train) == [(1, "train/note", "of the step")]


def test_the_last_medium_of_a_name_counts_and_a_later_step_hands_on_those_of_the_one_before(log, written, position):
    def train():
        log.text("note", "first")
        log.text("note", "second")
        position.step = 1
        log.text("note", "third")
        position.step = 2
        log.media.release()
        log.text("note", "after the last record")

    assert written(train) == [(1, "train/note", "second"), (2, "train/note", "third")]
