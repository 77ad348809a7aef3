from __future__ import annotations

import os

from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.run.config_change import change_config, keep_config, take_back_config
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


def files(directory):
    return {path.name: path.read_text() for path in directory.path.iterdir() if path.is_file()}


def change(directory):
    directory.config.write_text("lr: 1\n")
    os.utime(directory.config, (50, 50))
    change_config(directory, "lr: 2\n")


def test_the_first_configuration_changes_nothing(directory):
    change_config(directory, "lr: 1\n")
    assert files(directory) == {"config.yaml": "lr: 1\n"}
    assert not take_back_config(directory)


def test_a_change_is_taken_back_with_its_time(directory):
    change(directory)
    assert take_back_config(directory)
    assert files(directory) == {"config.yaml": "lr: 1\n"}
    assert directory.config.stat().st_mtime == 50
    assert not take_back_config(directory)


def test_a_second_change_before_an_attempt_began_goes_back_to_the_last_that_worked(directory):
    change(directory)
    change_config(directory, "lr: 3\n")
    assert take_back_config(directory)
    assert files(directory) == {"config.yaml": "lr: 1\n"}


def test_a_change_stays_once_an_attempt_has_begun(directory):
    change(directory)
    keep_config(directory)
    assert not take_back_config(directory)
    assert files(directory) == {"config.yaml": "lr: 2\n"}


def test_an_attempt_that_failed_before_it_began_takes_it_back(directory):
    ledger = Ledger(directory)
    for reason, began, lr in ((Reason.PREEMPTED, False, 2), (Reason.FAILED, True, 2), (Reason.FAILED, False, 1)):
        change(directory)
        attempt = ledger.claim()
        if began:
            ledger.start(attempt, job_id=None, nodes=[], world_size=1, step=0)
        record_end(directory, attempt, Outcome(reason, 0), world_size=1)
        assert directory.config.read_text() == f"lr: {lr}\n"
