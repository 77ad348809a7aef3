from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from hpctrain.errors import RendezvousError
from hpctrain.rank.sealed_store import ZERO_KEY, Handshake, Seal, SealedStore


@pytest.fixture
def inner():
    return HashStore()


def test_values_of_the_ranks_arrive_through_torchs_prefix_as_well(inner):
    store = SealedStore(inner, Seal(b"k"))
    PrefixStore("world", store).set("a", "one")
    assert PrefixStore("world", store).get("a") == b"one"
    assert store.add("n", 2) == 2
    assert store.check(["world/a"])


@pytest.mark.parametrize("forged", [b"", b"one", b"\0" * 32, b"\0" * 64])
def test_a_value_without_the_code_is_refused(inner, forged):
    inner.set("a", forged)
    with pytest.raises(RendezvousError, match="no rank of this attempt wrote the value of a in the store"):
        SealedStore(inner, Seal(b"k")).get("a")


def test_a_value_under_another_key_is_refused(inner):
    store = SealedStore(inner, Seal(b"k"))
    store.set("a", "one")
    inner.set("b", inner.get("a"))
    with pytest.raises(RendezvousError):
        store.get("b")


def test_parts_are_not_run_together():
    seal = Seal(b"k")
    assert seal.mac("ab", "c") != seal.mac("a", "bc")


def meet(inner, secrets, tokens=("t", "t"), timeout_s=5.0, replaced=None):
    """Rank zero and rank one meet; returns what each of them got.

    Args:
        inner: the store.
        secrets: theirs.
        tokens: theirs.
        timeout_s: bound on the wait.
        replaced: what an intruder writes in place of rank zero's nonce, as soon as rank one has read it.
    """
    found = [None, None]
    handshakes = [Handshake(secret, token) for secret, token in zip(secrets, tokens, strict=True)]
    zero = handshakes[0].announce(inner)
    if handshakes[1].recognise(inner) != zero:
        return "a stranger"
    inner.set(ZERO_KEY, replaced or inner.get(ZERO_KEY))

    def be_one():
        found[1] = handshakes[1].introduce(inner, zero, 1, timeout_s)

    thread = threading.Thread(target=be_one)
    thread.start()
    found[0] = handshakes[0].welcome(inner, zero, [1], timeout_s)
    thread.join()
    return found


@pytest.mark.parametrize("replaced", [None, "junk" * 20])
def test_ranks_with_the_same_secret_meet(inner, replaced):
    zero, one = meet(inner, (b"s", b"s"), replaced=replaced)
    zero.set("a", "from zero")
    assert one.get("a") == b"from zero"


def test_other_ranks_are_strangers(inner):
    assert meet(inner, (b"s", b"other")) == "a stranger"
    assert meet(inner, (b"s", b"s"), ("t", "other")) == "a stranger"


def test_values_of_an_earlier_meeting_are_worthless(inner):
    earlier, _ = meet(inner, (b"s", b"s"))
    earlier.set("a", "from before")
    inner.delete_key("hpctrain/rank/1/welcome")
    zero, _ = meet(inner, (b"s", b"s"))
    with pytest.raises(RendezvousError):
        zero.get("a")


def test_a_missing_rank_is_named(inner):
    handshake = Handshake(b"s", "t")
    zero = handshake.announce(inner)
    with pytest.raises(RendezvousError, match="ranks 1, 2 did not arrive within 0 s; check their logs") as raised:
        handshake.welcome(inner, zero, [1, 2], 0.1)
    assert raised.value.waited


def test_a_rank_that_waits_for_rank_zero_handles_signals(inner):
    """Such as a second Ctrl-C."""

    def stop(number, frame):
        raise KeyboardInterrupt

    handshake = Handshake(b"s", "t")
    zero = handshake.announce(inner)
    earlier = signal.signal(signal.SIGUSR1, stop)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            handshake.introduce(inner, zero, 1, 30.0)
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert time.monotonic() - began < 20


def test_all_missing_ranks_are_looked_for_at_once(inner):
    """Each look at a store's file locks it."""

    class CountingStore(Store):
        looks = 0

        def check(self, keys):
            self.looks += 1
            return inner.check(keys)

    store = CountingStore()
    with pytest.raises(RendezvousError):
        Handshake(b"s", "t").welcome(store, b"zero", range(1, 1000), 0.2)
    assert store.looks < 1000 + 50
