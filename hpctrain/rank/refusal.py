"""Why the ranks can't go on, which rank zero tells them through the store, before they have a process group."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store

READ_TIMEOUT_S = 60.0
"""Seconds that rank zero waits for the other ranks to read a refusal: the store is gone once rank zero exits."""


def share_refusal(store: Store, topic: str, why: str, num_others: int) -> None:
    """Publish a refusal, as rank zero, and wait until all others have read it; collective with `read_refusal`.

    Args:
        store: that the ranks share.
        topic: what may be refused; each only once.
        why: the refusal; empty if there is none, for which nobody waits.
        num_others: number of the other ranks.
    """
    store.set(_key(topic), why)
    deadline = time.monotonic() + READ_TIMEOUT_S
    # a rank that arrives after the store is gone would look for it until the rendezvous times out
    while why and store.add(_readers_key(topic), 0) < num_others and time.monotonic() < deadline:
        time.sleep(0.05)


def read_refusal(store: Store, topic: str) -> str:
    """Wait for what rank zero says, and return it: empty if it refuses nothing; collective with `share_refusal`.

    Args:
        store: that the ranks share.
        topic: as rank zero names it.
    """
    why = store.get(_key(topic)).decode()
    if why:
        store.add(_readers_key(topic), 1)
    return why


def _key(topic: str) -> str:
    return f"hpctrain/refusal/{topic}"


def _readers_key(topic: str) -> str:
    return f"hpctrain/refusal_readers/{topic}"
