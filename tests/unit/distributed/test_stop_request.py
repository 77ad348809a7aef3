from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.distributed.stop_request import STOP_SIGNALS, Stop, StopKind, StopRequest


@pytest.fixture
def request_to_stop(default_sighup):
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    made = StopRequest()
    made.install()
    yield made
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
