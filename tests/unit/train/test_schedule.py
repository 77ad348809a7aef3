import itertools
import math

import pytest
import torch

from hpctrain.config.schedule import Schedule
from hpctrain.errors import ConfigError
from hpctrain.train.learning_rate import learning_rate_factor


def values(schedule, total, epoch=10):
    factor = learning_rate_factor(schedule, total, epoch)
    return [factor(step) for step in range(total)]


def test_constant_is_one_after_the_warm_up():
    assert values(Schedule(kind="constant", warmup_steps=3), 5) == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_a_warm_up_in_epochs_is_one_in_steps(kind):
    assert values(Schedule(kind=kind, warmup_epochs=0.5), 30) == values(Schedule(kind=kind, warmup_steps=5), 30)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_begins_at_one_and_ends_at_the_final_factor(kind):
    found = values(Schedule(kind=kind, warmup_steps=2, final_factor=0.1), 12)
    assert found[2] == 1.0
    assert found[-1] == pytest.approx(0.1)
    assert all(before > after for before, after in itertools.pairwise(found[2:]))


def test_cosine_is_a_half_cosine():
    assert values(Schedule(kind="cosine"), 101)[25] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize("places", [{"drop_at_steps": [4, 8]}, {"drop_at_epochs": [0.8, 0.4]}])
def test_steps_drop_where_they_are_told_to(places):
    found = values(Schedule(kind="step", drop_factor=0.5, warmup_steps=1, **places), 10)
    assert found == [0.5, *[1.0] * 3, *[0.5] * 4, *[0.25] * 2]


@pytest.mark.parametrize("length", [{"decay_steps": 4}, {"decay_epochs": 0.4}, {}])
def test_warmup_stable_decay(length):
    total = 12 if length else 41
    found = values(Schedule(kind="wsd", warmup_steps=2, final_factor=0.2, **length), total)
    assert found[:2] == [1 / 3, 2 / 3]
    assert found[2:-4] == [1.0] * (total - 6)
    assert found[-5:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_decay_that_is_longer_than_the_run_begins_after_the_warm_up():
    found = values(Schedule(kind="wsd", warmup_steps=2, decay_steps=100), 6)
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize(("schedule", "share"), [({}, 0.3), ({"warmup_steps": 9}, 0.2)])
def test_one_cycle_is_torchs_own(schedule, share):
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=50, pct_start=share, cycle_momentum=False, div_factor=10, final_div_factor=100
    )
    expected = []
    for _ in range(50):
        expected += reference.get_last_lr()
        optimizer.step()
        if len(expected) < 50:
            reference.step()
    found = values(Schedule(kind="one_cycle", start_factor=0.1, final_factor=0.001, **schedule), 50)
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd", "one_cycle"])
def test_a_run_of_one_step_is_defined(kind):
    assert 0 <= values(Schedule(kind=kind), 1)[0] <= 1


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd", "one_cycle"])
def test_a_step_past_the_end_has_the_final_factor(kind):
    assert learning_rate_factor(Schedule(kind=kind, final_factor=0.2), 10, 10)(500) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"warmup_steps": 2, "warmup_epochs": 1.0}, "schedule.warmup_epochs=1.0"),
        ({"decay_steps": 2, "decay_epochs": 1.0}, "schedule.decay_epochs=1.0"),
        ({"drop_at_steps": [2], "drop_at_epochs": [1.0]}, "schedule.drop_at_epochs"),
        ({"kind": "step"}, "schedule.drop_at_epochs"),
        ({"drop_at_steps": [0]}, "schedule.drop_at_steps=0"),
    ],
)
def test_lengths_that_cannot_be_meant(options, named):
    with pytest.raises(ConfigError) as caught:
        Schedule(**options)
    assert str(caught.value).startswith(named)
