import pytest

from hpctrain.config.schedule import Schedule
from hpctrain.errors import ConfigError


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [
        ({"warmup_epochs": 1.0}, {"warmup_steps": 5}),
        ({"drop_at_epochs": [1.0]}, {"drop_at_steps": [5]}),
        ({"decay_epochs": 1.0}, {"decay_steps": 5}),
    ],
)
def test_a_length_is_in_steps_or_in_epochs(epochs, steps):
    Schedule(**epochs)
    Schedule(**steps)
    (key,), (other,) = epochs, steps
    with pytest.raises(
        ConfigError, match=rf"^schedule\.{key}=.*: conflicts with schedule\.{other}=.*; set one of them"
    ):
        Schedule(**epochs, **steps)


def test_steps_need_a_place():
    with pytest.raises(ConfigError, match="needs at least one drop"):
        Schedule(kind="step")
    assert Schedule(kind="step", drop_at_steps=[3]).drop_at_steps == [3]
