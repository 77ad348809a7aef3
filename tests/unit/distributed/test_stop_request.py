from __future__ import annotations

import os
import signal

import pytest

from hpctrain.distributed.stop_request import STOP_SIGNALS, StopFlag


@pytest.fixture
def flag():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    flag = StopFlag()
    flag.install()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_nothing_else(flag, number):
    assert flag.number == 0
    send(number)
    assert (flag.number, flag.signal) == (number, number)


def test_the_largest_number_stands(flag):
    send(signal.SIGTERM, signal.SIGUSR1)
    assert flag.number == signal.SIGTERM


@pytest.mark.parametrize("between", [(), (signal.SIGTERM,)])
def test_a_second_interrupt_does_not_wait_and_a_third_does_not_disturb_the_last_words(flag, between):
    send(signal.SIGINT, *between)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    send(signal.SIGINT, signal.SIGINT)
    assert flag.number >= signal.SIGINT
