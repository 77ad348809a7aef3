"""What follows from an attempt's end: the table of `cluster.requeue`, row by row."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.attempt.requeue import Action, decide
from hpctrain.config.cluster import Requeue
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason

POLICY = Requeue()
FAILURES = [Reason.HANG, Reason.INFRASTRUCTURE, Reason.OUT_OF_MEMORY]


def attempts(*reasons, gains=10, **last):
    """A history in which each attempt gained so many steps; `last` are fields of the first one's end."""
    found = [
        Attempt(attempt=n + 1, start_step=n * gains, reason=reason, end_step=(n + 1) * gains)
        for n, reason in enumerate(reasons)
    ]
    return [replace(found[0], **last), *found[1:]]


@pytest.mark.parametrize("reason", [Reason.COMPLETED, Reason.CANCELLED, Reason.FAILED])
def test_nothing_follows(reason):
    decision = decide(attempts(reason), POLICY, num_attempts_here=1)
    assert (decision.action, decision.reason) == (Action.END, reason)


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.NODE_FAILURE])
def test_the_queue_again_as_often_as_it_takes(reason):
    assert decide(attempts(*[reason] * 50), POLICY, num_attempts_here=1).action is Action.REQUEUE


@pytest.mark.parametrize(
    ("reason", "key"), [(Reason.PREEMPTED, "max_preemptions"), (Reason.TIME_LIMIT, "max_time_limits")]
)
def test_a_budget_of_its_own(reason, key):
    policy = Requeue(**{key: 1})
    assert decide(attempts(reason, Reason.NODE_FAILURE), policy, num_attempts_here=1).action is Action.REQUEUE
    decision = decide(attempts(reason, Reason.NODE_FAILURE, reason), policy, num_attempts_here=1)
    assert (decision.action, decision.reason) == (Action.END, reason)
    assert f"cluster.requeue.{key}=1 allows no more" in decision.why


@pytest.mark.parametrize("reason", FAILURES)
def test_a_failure_of_the_machine_gets_new_ranks_then_the_queue(reason):
    assert decide(attempts(reason), POLICY, num_attempts_here=1).action is Action.RESTART
    assert decide(attempts(reason, reason), POLICY, num_attempts_here=2).action is Action.REQUEUE


def test_failures_share_one_budget():
    assert decide(attempts(*FAILURES), POLICY, num_attempts_here=1).action is Action.RESTART
    decision = decide(attempts(*FAILURES, Reason.HANG), POLICY, num_attempts_here=1)
    assert (decision.action, decision.reason) == (Action.END, Reason.HANG)


def continued(*reasons, **more):
    """A history in which each attempt but the last was followed by new ranks in the same allocation."""
    *before, last = attempts(*reasons, **more)
    return [*(replace(one, next="restart") for one in before), last]


def test_an_unexplained_signal_gets_new_ranks_in_the_allocation_and_never_a_requeue():
    for count in (1, 2, 3):
        decision = decide(continued(*[Reason.INTERRUPTED] * count), POLICY, num_attempts_here=count)
        assert (decision.action, decision.reason) == (Action.RESTART, Reason.INTERRUPTED)


@pytest.mark.parametrize("reasons", [[Reason.INTERRUPTED] * 4, [*FAILURES, Reason.INTERRUPTED]])
def test_the_budget_of_failures_binds_unexplained_signals(reasons):
    decision = decide(continued(*reasons), POLICY, num_attempts_here=1)
    assert (decision.action, decision.reason) == (Action.END, Reason.INTERRUPTED)
    assert "cluster.requeue.max_failures=3 allows no more" in decision.why


def test_an_interruption_after_which_its_user_resumed_the_run_spends_no_budget():
    assert decide(attempts(*[Reason.INTERRUPTED] * 9), POLICY, num_attempts_here=1).action is Action.RESTART


def test_an_unexplained_signal_before_the_first_step_is_no_stall():
    early = continued(*[Reason.INTERRUPTED] * 3, gains=0)
    assert decide(early, POLICY, num_attempts_here=3).action is Action.RESTART
    stuck = continued(Reason.HANG, Reason.INTERRUPTED, Reason.HANG, gains=0)
    assert decide(stuck, POLICY, num_attempts_here=3).reason is Reason.STALLED


def test_two_attempts_in_a_row_without_a_step_gained_end_the_run():
    stuck = attempts(Reason.HANG, Reason.TIME_LIMIT, gains=0)
    decision = decide(stuck, POLICY, num_attempts_here=1)
    assert (decision.action, decision.reason) == (Action.END, Reason.STALLED)
    assert "2 attempts in a row" in decision.why
    assert decide(stuck, Requeue(max_stalled_attempts=3), num_attempts_here=1).action is Action.REQUEUE


@pytest.mark.parametrize("between", [Reason.PREEMPTED, Reason.NODE_FAILURE])
def test_what_says_nothing_of_the_run_neither_counts_as_standing_still_nor_breaks_the_row(between):
    assert decide(attempts(*[between] * 5, gains=0), POLICY, num_attempts_here=1).action is Action.REQUEUE
    row = attempts(Reason.HANG, between, Reason.HANG, gains=0)
    assert decide(row, POLICY, num_attempts_here=1).reason is Reason.STALLED


def story(*ends):
    """A history of (reason, first step, saved step)."""
    return [
        Attempt(attempt=n, start_step=start, reason=reason, end_step=saved, saved_step=saved)
        for n, (reason, start, saved) in enumerate(ends, start=1)
    ]


BLAMELESS = pytest.mark.parametrize("blameless", [Reason.PREEMPTED, Reason.NODE_FAILURE, Reason.INTERRUPTED])


@BLAMELESS
def test_a_step_gained_before_an_end_that_says_nothing_of_the_run_breaks_the_row(blameless):
    infrastructure = Reason.INFRASTRUCTURE
    row = story((infrastructure, 0, 0), (blameless, 0, 1000), (blameless, 1000, 5000), (infrastructure, 5000, 5000))
    assert decide(row, POLICY, num_attempts_here=1).reason is infrastructure


@BLAMELESS
@pytest.mark.parametrize("saved", [0, 1000])
def test_an_end_that_says_nothing_of_the_run_does_not_end_one_that_was_resumed_after_it_stalled(blameless, saved):
    resumed = story((Reason.HANG, 0, 0), (Reason.STALLED, 0, 0), (blameless, 0, saved))
    assert decide(resumed, POLICY, num_attempts_here=1).action is not Action.END
    again = [*resumed, *story((Reason.HANG, saved, saved))]
    assert decide(again, POLICY, num_attempts_here=2).reason is (Reason.HANG if saved else Reason.STALLED)


def test_a_step_that_was_done_and_not_saved_is_none_gained():
    row = attempts(Reason.HANG, Reason.HANG)
    unsaved = [Attempt(attempt=n, start_step=0, reason=Reason.HANG, end_step=9, saved_step=0) for n in (1, 2)]
    assert decide(row, POLICY, num_attempts_here=1).action is Action.RESTART
    assert decide(unsaved, POLICY, num_attempts_here=1).reason is Reason.STALLED


def test_a_node_that_is_blamed_again_is_left_out():
    again = attempts(Reason.INFRASTRUCTURE, Reason.INFRASTRUCTURE, suspects=["n2"])
    assert decide(again, POLICY, num_attempts_here=2, suspects=["n3"]).action is Action.REQUEUE
    decision = decide(again, POLICY, num_attempts_here=2, suspects=["n2", "n3"])
    assert (decision.action, decision.exclude) == (Action.RESUBMIT, ("n2",))
    decision = decide(again, POLICY, num_attempts_here=2, suspects=["n2", "n3"], spares=1)
    assert (decision.action, decision.exclude) == (Action.RESTART, ("n2",))


def test_a_node_whose_machine_fails_before_the_first_save_is_left_out_before_the_run_is_given_up():
    broken = attempts(Reason.INFRASTRUCTURE, Reason.INFRASTRUCTURE, gains=0, suspects=["n3"])
    decision = decide(broken, POLICY, num_attempts_here=2, suspects=["n3"], machine_fault_reported=True)
    assert (decision.action, decision.reason, decision.exclude) == (Action.RESUBMIT, Reason.INFRASTRUCTURE, ("n3",))
    replaced = decide(broken, POLICY, num_attempts_here=2, suspects=["n3"], machine_fault_reported=True, spares=1)
    assert (replaced.action, replaced.exclude) == (Action.RESTART, ("n3",))
    elsewhere = attempts(*[Reason.INFRASTRUCTURE] * 3, gains=0, suspects=["n3"])
    assert (
        decide(elsewhere, POLICY, num_attempts_here=1, suspects=["n5"], machine_fault_reported=True).reason
        is Reason.STALLED
    )
    decision = decide(
        broken, Requeue(max_failures=1), num_attempts_here=2, suspects=["n3"], machine_fault_reported=True
    )
    assert (decision.action, decision.reason) == (Action.END, Reason.INFRASTRUCTURE)


def test_ranks_that_die_without_a_record_on_one_node_may_be_the_runs_own_fault():
    silent = attempts(Reason.INFRASTRUCTURE, Reason.INFRASTRUCTURE, gains=0, suspects=["n2"])
    decision = decide(silent, POLICY, num_attempts_here=2, suspects=["n2"])
    assert (decision.action, decision.reason) == (Action.END, Reason.STALLED)
    assert "cluster.exclude=n2" in decision.why


@given(
    st.lists(
        st.tuples(st.sampled_from(FAILURES), st.sampled_from([(), ("n1",), ("n2",), ("n3",)]), st.booleans()),
        min_size=5,
        max_size=5,
    ),
    st.integers(1, 3),
)
def test_a_run_that_gains_nothing_ends_and_no_later_than_it_must(ends, max_stalled):
    policy = Requeue(max_failures=9, max_stalled_attempts=max_stalled)
    history, excluded = [], set()
    for number, (reason, found, reported) in enumerate(ends, start=1):
        suspects = tuple(node for node in found if node not in excluded)
        history.append(Attempt(attempt=number, start_step=0, reason=reason, end_step=0))
        decision = decide(history, policy, num_attempts_here=number, suspects=suspects, machine_fault_reported=reported)
        blamed = [name for before in history[:-1] for name in before.suspects]
        if number < max_stalled:
            assert decision.action is not Action.END
        else:
            continues = reported and any(node in blamed for node in suspects)
            assert decision.reason is (reason if continues else Reason.STALLED)
        history[-1] = replace(history[-1], **asdict(decision.facts(suspects)))
        excluded |= set(decision.exclude)
        if decision.action is Action.END:
            return
    assert len(excluded) > len(ends) - max_stalled


@pytest.mark.parametrize(("spares", "action"), [(0, Action.REQUEUE), (1, Action.REQUEUE), (2, Action.RESTART)])
def test_dead_nodes_are_replaced_while_there_are_enough_in_reserve(spares, action):
    decision = decide(attempts(Reason.NODE_FAILURE), POLICY, num_attempts_here=1, suspects=["n2", "n3"], spares=spares)
    assert decision.action is action
    assert decision.exclude == (("n2", "n3") if action is Action.RESTART else ())


def of_program(*ends, reason=Reason.TIME_LIMIT, saved=0):
    """A program's history: the step that each attempt reported last; all resumed from, and left, the same save."""
    return [
        Attempt(attempt=n + 1, start_step=saved, reason=reason, end_step=step, saved_step=saved)
        for n, step in enumerate(ends)
    ]


def action_of_program(history):
    return decide(history, POLICY, num_attempts_here=1, is_program=True).action


def test_a_program_that_reports_nothing_is_not_taken_for_one_that_stalls():
    assert action_of_program(of_program(*[0] * 20)) is Action.REQUEUE
    assert decide(of_program(0, 0), POLICY, num_attempts_here=1).reason is Reason.STALLED  # a training
    failures = of_program(0, 0, 0, 0, reason=Reason.INFRASTRUCTURE)
    assert action_of_program(failures[:3]) is Action.RESTART
    decision = decide(failures, POLICY, num_attempts_here=1, is_program=True)
    assert (decision.action, decision.reason) == (Action.END, Reason.INFRASTRUCTURE)


def test_a_program_without_reported_saves_is_judged_by_how_far_it_gets():
    assert action_of_program(of_program(10, 20, 30, 40)) is Action.REQUEUE
    decision = decide(of_program(10, 10, 9), POLICY, num_attempts_here=1, is_program=True)
    assert (decision.action, decision.reason) == (Action.END, Reason.STALLED)
    assert action_of_program(of_program(10, 10)) is Action.REQUEUE
    assert action_of_program(of_program(10, 0, 0)) is Action.END  # it has reported steps before


def test_a_program_that_reports_saves_is_judged_by_them():
    decision = decide(of_program(60, 70, saved=50), POLICY, num_attempts_here=1, is_program=True)
    assert (decision.action, decision.reason) == (Action.END, Reason.STALLED)


def test_a_paused_run_is_neither_requeued_nor_stalled():
    paused = Attempt(attempt=1, reason=Reason.PAUSED, start_step=40, end_step=40)
    decision = decide([paused, replace(paused, attempt=2)], Requeue(max_stalled_attempts=1), num_attempts_here=1)
    assert (decision.action, decision.reason, decision.reason.meaning.exit_code) == (Action.END, Reason.PAUSED, 4)
