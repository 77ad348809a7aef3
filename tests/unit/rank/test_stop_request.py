from __future__ import annotations

import faulthandler
import functools
import logging
import operator
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.rank.stop_request import STOP_SIGNALS, Stop, StopKind, StopRequest


@pytest.fixture
def request_to_stop(default_sighup):
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    made = StopRequest()
    made.install()
    yield made
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [*STOP_SIGNALS, signal.SIGHUP])
def test_a_signal_sets_the_request_and_nothing_else(request_to_stop, number):
    assert request_to_stop.pending is None
    send(number)
    assert request_to_stop.pending == Stop(StopKind.SIGNAL, number)
    assert request_to_stop.last_signal is number


def test_the_largest_number_stands_and_the_last_signal_is_known(request_to_stop):
    send(signal.SIGTERM, signal.SIGUSR1)
    assert request_to_stop.pending == Stop(StopKind.SIGNAL, signal.SIGTERM)
    assert request_to_stop.last_signal is signal.SIGUSR1


@pytest.mark.parametrize("between", [(), (signal.SIGTERM,)])
def test_a_second_interrupt_raises_and_a_third_does_not_disturb_the_recording_of_the_end(request_to_stop, between):
    send(signal.SIGINT, *between)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    send(signal.SIGINT, signal.SIGINT)
    assert request_to_stop.pending.signal >= signal.SIGINT


def test_an_error_is_a_stop_of_its_own_kind_whatever_signals_come(request_to_stop):
    error = OSError("no space left")
    request_to_stop.fail(error)
    assert request_to_stop.pending == Stop(StopKind.ERROR)
    send(signal.SIGUSR2)
    assert request_to_stop.pending == Stop(StopKind.ERROR, signal.SIGUSR2)
    assert request_to_stop.error is error


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        StopRequest().install()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in [*others.items(), (signal.SIGHUP, before)]:
            signal.signal(number, handler)


def test_in_another_thread_the_signals_stay_as_they_are():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(StopRequest().install).result()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


LATER = "; hpctrain has restored its own, and calls the others after them"


@pytest.fixture
def warnings(request_to_stop, caplog, monkeypatch):
    """Lets `pending` look at the handlers, and returns its warnings since the last time."""
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)

    def look():
        caplog.clear()
        request_to_stop.check_handlers()
        assert (request_to_stop.pending is None) == (request_to_stop.last_signal is None)
        return [record.getMessage() for record in caplog.records]

    return look


def test_handlers_that_a_library_replaced_are_back_and_call_the_librarys(request_to_stop, warnings):
    got = []

    def library(number, _frame):
        got.append(number)
        raise SystemExit

    assert warnings() == []
    previous = signal.signal(signal.SIGTERM, library)
    signal.signal(signal.SIGUSR1, functools.partial(library))
    replaced = f"{__name__} ({__file__}) has replaced the handlers of SIGUSR1, SIGTERM, at which a run saves and stops"
    assert warnings() == [replaced + LATER]
    send(signal.SIGTERM, signal.SIGUSR1)
    assert got == [signal.SIGTERM, signal.SIGUSR1]
    assert request_to_stop.last_signal is signal.SIGUSR1
    signal.signal(signal.SIGTERM, library)
    assert warnings() == []
    assert signal.getsignal(signal.SIGTERM) == previous


@pytest.mark.parametrize("passes_on_its_frame", [True, False])
def test_a_librarys_handler_may_call_the_one_before_it(request_to_stop, warnings, passes_on_its_frame):
    got = []

    def library(number, frame):
        got.append(number)
        before(number, frame if passes_on_its_frame else None)

    before = signal.signal(signal.SIGINT, library)
    assert len(warnings()) == 1
    send(signal.SIGINT)
    assert got == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert got == [signal.SIGINT]


def test_a_second_interrupt_ends_a_librarys_handler_that_waits(request_to_stop, warnings):
    def library(_number, _frame):
        send(signal.SIGINT)
        raise AssertionError

    signal.signal(signal.SIGINT, library)
    warnings()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert request_to_stop.pending == Stop(StopKind.SIGNAL, signal.SIGINT)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_a_signal_that_nothing_handles_is_handled_again(request_to_stop, warnings, handler):
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    name = getattr(handler, "name", "Python's own handler")
    (warning,) = warnings()
    assert warning.startswith(f"a library has set {name} for SIGINT, SIGUSR1, SIGUSR2, SIGTERM, at which a run")
    send(signal.SIGTERM)
    assert request_to_stop.pending == Stop(StopKind.SIGNAL, signal.SIGTERM)


def test_handlers_in_c_are_seen_too(request_to_stop, warnings):
    faulthandler.register(signal.SIGUSR1)
    try:
        (warning,) = warnings()
        assert warning.startswith("a library in C has replaced the handlers of SIGUSR1, at which a run")
        send(signal.SIGUSR1)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    assert request_to_stop.last_signal is signal.SIGUSR1


def test_blocked_signals_are_unblocked(request_to_stop, warnings):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2, signal.SIGALRM])
    try:
        send(signal.SIGTERM)  # another thread may get it
        (warning,) = warnings()
        assert warning.startswith("a library has blocked SIGUSR2, SIGTERM, at which a run saves and stops")
        assert request_to_stop.last_signal is signal.SIGTERM
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGALRM}
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])


def test_a_thread_that_handles_no_signals_restores_none():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    made = StopRequest()

    def train():
        made.install()
        made.check_handlers()
        return made.pending

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train).result() is None
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def test_a_handler_without_a_name_or_module_is_restored_like_any_other(request_to_stop, warnings):
    """Reading where it comes from must not end the training."""
    for handler in ([].append, operator.methodcaller("hex"), functools.partial(print, end="")):
        signal.signal(signal.SIGUSR2, handler)
        warnings()
    assert signal.getsignal(signal.SIGUSR2) == request_to_stop._handle
