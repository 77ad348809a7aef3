import pytest

from hpctrain.errors import SchedulerError
from hpctrain.scheduler.job import JobState


@pytest.mark.parametrize("state", JobState)
def test_every_state_is_exactly_one_of_pending_running_and_finished(state: JobState) -> None:
    assert [state.is_pending, state.is_running, state.is_finished].count(True) == 1


def test_what_holds_nodes_is_running() -> None:
    running = {state.name for state in JobState if state.is_running}
    assert running == {
        *("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"),
        *("CONFIGURING", "POWER_UP_NODE", "COMPLETING", "STAGE_OUT", "UNKNOWN"),
    }


def test_a_requeued_job_is_pending_and_a_preempted_one_is_not() -> None:
    assert JobState.REQUEUED.is_pending
    assert JobState.PREEMPTED.is_finished


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", JobState.RUNNING),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("COMPLETED+", JobState.COMPLETED),
        (" OUT_OF_MEMORY ", JobState.OUT_OF_MEMORY),
    ],
)
def test_parses_what_the_commands_print(text: str, state: JobState) -> None:
    assert JobState.parse(text) is state


def test_an_unknown_state_is_logged_and_counts_as_running(caplog: pytest.LogCaptureFixture) -> None:
    state = JobState.parse("DREAMING")
    assert (state, state.is_running) == (JobState.UNKNOWN, True)
    assert "state DREAMING, which this hpctrain doesn't know; treating the job as running" in caplog.text


@pytest.mark.parametrize("text", ["", " ", "+", "running", "12"])
def test_what_is_not_a_state_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        JobState.parse(text)
    assert repr(text) in str(caught.value)
