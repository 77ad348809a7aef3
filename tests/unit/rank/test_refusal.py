from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import TCPStore

from hpctrain.rank import rendezvous
from hpctrain.rank.rendezvous import read_refusal, share_refusal


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_rank_zero_waits_until_all_others_have_read_why(store):
    read = []

    def be_rank():
        time.sleep(0.3)
        read.append(read_refusal(TCPStore("127.0.0.1", store.port, is_master=False), "a topic"))

    threads = [threading.Thread(target=be_rank) for _ in range(3)]
    for thread in threads:
        thread.start()
    share_refusal(store, "a topic", "no room", 3)
    assert store.add("hpctrain/refusal_readers/a topic", 0) == 3
    for thread in threads:
        thread.join(60)
    assert read == ["no room"] * 3


def test_without_a_refusal_nobody_waits(store):
    begin = time.monotonic()
    share_refusal(store, "a topic", "", 3)
    assert read_refusal(store, "a topic") == ""
    assert time.monotonic() - begin < 5


def test_a_rank_that_never_reads_costs_a_bounded_wait(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "READ_TIMEOUT_S", 0.2)
    share_refusal(store, "a topic", "no room", 1)
    assert read_refusal(store, "a topic") == "no room"
    assert store.add("hpctrain/refusal_readers/a topic", 0) == 1
