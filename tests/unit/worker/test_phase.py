from __future__ import annotations

import pytest

from hpctrain.config.health import Health
from hpctrain.errors import ConfigError
from hpctrain.run.times import SPENT, STARTING, WORKING
from hpctrain.worker.phase import Phase


def bounds(**keys):
    health = Health(**keys)
    return {phase.name: phase.bound_s(health) for phase in Phase}


def test_every_phase_is_one_that_the_times_know():
    phases = {doing: Phase.of(doing) for doing in SPENT}
    assert {doing for doing, phase in phases.items() if phase is Phase.START} == set(STARTING)
    assert [phases[doing] for doing in WORKING] == [Phase.TRAINING, Phase.EVALUATION, Phase.SAVING]


def test_a_shorter_bound_on_steps_leaves_the_other_phases_their_time():
    assert bounds(hang_timeout_s=60) == {"START": 1800, "TRAINING": 60, "EVALUATION": 1800, "SAVING": 1800}


def test_a_longer_bound_on_steps_holds_for_all():
    assert set(bounds(hang_timeout_s=7200).values()) == {7200}


def test_each_phase_has_a_key_of_its_own():
    given = {"hang_timeout_s": 1, "start_timeout_s": 2, "eval_timeout_s": 3, "save_timeout_s": 4}
    assert bounds(**given) == {"TRAINING": 1, "START": 2, "EVALUATION": 3, "SAVING": 4}


@pytest.mark.parametrize("key", ["hang_timeout_s", "start_timeout_s", "eval_timeout_s", "save_timeout_s"])
@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan"), -1])
def test_bounds_that_cannot_be_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"health\.{key}=.*must lie in \[1, 1e\+07\]"):
        Health(**{key: value})


@pytest.mark.parametrize("longest", ["hang_timeout_s", "start_timeout_s", "eval_timeout_s", "save_timeout_s"])
def test_collectives_wait_longer_than_any_watchdog(longest):
    health = Health(**{longest: 9000})
    assert health.collective_timeout_s > 9000
    assert all(phase.bound_s(health) < health.collective_timeout_s for phase in Phase)


def test_the_complaint_names_the_key_to_change():
    health = Health(hang_timeout_s=90, start_timeout_s=600)
    assert Phase.TRAINING.complaint(health) == "no step for 90 s (health.hang_timeout_s)"
    assert Phase.START.complaint(health) == "start-up and no first step for 600 s (health.start_timeout_s)"


def test_who_waits_in_vain_for_others_says_so_before_the_watchdog_speaks():
    health = Health(start_timeout_s=100)
    assert health.meeting_timeout_s == 90
