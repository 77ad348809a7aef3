from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import IterableDataset

from hpctrain.data.bookmark import Bookmark
from hpctrain.data.stream import ShardedStream
from hpctrain.errors import TaskError
from hpctrain.train.training_data import build_stream_state


class Plain(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Stateful(Plain):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_bookmarks_come_back(lone_world):
    place = torch.tensor([3])
    state = build_stream_state(ShardedStream([Stateful()] * 2), lone_world)
    state.bookmarks.add([Bookmark(1, 0, 0, 0, 5, {"place": place}), Bookmark(0, 0, 0, 0, 4, (1, "a"))])
    saved = state.state()
    place += 1
    again = build_stream_state(ShardedStream([Stateful()] * 2), lone_world)
    again.load_state(saved)
    assert again.bookmarks.of(0) == (0, 0, 0, 0, 4, (1, "a"))
    assert again.bookmarks.of(1).state == {"place": torch.tensor([3])}


def test_without_states_nothing_is_saved(lone_world):
    for data in (Plain(), [1, 2], torch.arange(3)):
        state = build_stream_state(data, lone_world)
        assert state.state() == {"streams": None}
        state.load_state({})
        assert list(state.bookmarks) == []


def test_a_generator_is_refused_without_a_remark_on_its_state(lone_world, caplog):
    with pytest.raises(TaskError, match="a generator can be read only once"):
        build_stream_state((number for number in range(3)), lone_world)
    assert caplog.text == ""


def test_the_states_of_another_number_of_streams_are_left_alone(lone_world, caplog):
    state = build_stream_state(Stateful(), lone_world)
    state.bookmarks.add([Bookmark(0, 0, 0, 0, 4, {})])
    other = build_stream_state(ShardedStream([Stateful()] * 3), lone_world)
    other.load_state(state.state())
    assert list(other.bookmarks) == []
    assert "has the states of 1 stream, and the data have 3 streams now: they are read from their start" in caplog.text


def test_a_state_that_cannot_be_saved_is_named(lone_world):
    state = build_stream_state(Stateful(), lone_world)
    state.bookmarks.add([Bookmark(0, 0, 0, 0, 4, {"lock": object()})])
    with pytest.raises(TaskError, match=r"state_dict\(\) of stream 0: bookmark\['state'\]\['lock'\]"):
        state.state()


def test_what_a_resume_costs_is_said_once_at_the_start(lone_world, caplog):
    with caplog.at_level(logging.WARNING, "hpctrain.train"):
        build_stream_state(ShardedStream([Plain(), Plain(), Stateful()]), lone_world)
    (message,) = caplog.messages
    assert message.startswith("Plain has no state, and can't seek: a resume reads it again from its start")
