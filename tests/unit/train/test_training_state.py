from __future__ import annotations

from collections import Counter

from hpctrain.checkpoint.compare_saves import compare_saves
from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.state import Stateful
from hpctrain.train.training import build
from hpctrain.train.training_state import WeightsState, training_state
from tests.unit.train.small_task import Small

KEYS = {
    *("best", "callbacks", "ema", "ending", "evaluation_due", "evaluation_mode", "loss_weights", "meter"),
    *("meter_by_rank", "num_samples", "optimizer", "schedule", "skipped_updates", "streams", "task"),
}


class Clicks(Stateful):
    """A part that a training may get one day."""

    def __init__(self, number):
        self.number = number

    def state(self):
        return {"clicks": {"number": self.number}}

    def load_state(self, saved):
        self.number = saved["clicks"]["number"]


def test_each_key_is_that_of_one_part(compose_small, lone_world):
    training = build(compose_small("trainer.ema_decay=0.5"), lone_world)
    states = [each.state() for each in training_state(training, None, WeightsState(training))]
    assert set(Counter(key for state in states for key in state).values()) == {1}


def test_the_keys_of_a_checkpoint_are_those_of_earlier_versions(checkpointing_of, directory):
    for step, words in enumerate([(), ("trainer.ema_decay=0.5",)], 1):
        checkpointing_of(*words)[0].save(step, evaluation_due=False, wait=True)
        assert load(directory.checkpoint(step)).extra.keys() == KEYS


def test_one_entry_of_the_list_is_saved_resumed_and_compared(checkpointing_of, directory):
    def with_clicks(number):
        checkpointing, clicks = checkpointing_of()[0], Clicks(number)
        checkpointing._state += (clicks,)
        return checkpointing, clicks

    for number in (3, 4):
        with_clicks(number)[0].save(number, evaluation_due=False, wait=True)
    again, clicks = with_clicks(0)
    assert again.resume().step == 4
    assert clicks.number == 4
    numbers = compare_saves(directory.checkpoint(3), directory.checkpoint(4)).numbers
    assert "state.pt:extra.clicks.number" in numbers


def test_a_task_that_restores_its_state_knows_where_the_training_is(checkpointing_of, monkeypatch):
    seen = []
    monkeypatch.setattr(Small, "state_dict", lambda self: {"one": 1}, raising=False)
    monkeypatch.setattr(Small, "load_state_dict", lambda self, state: seen.append(self.position.step), raising=False)
    checkpointing_of()[0].save(6, evaluation_due=False, wait=True)
    checkpointing_of()[0].resume()
    assert seen[0] == 6
