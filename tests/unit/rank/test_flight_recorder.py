from __future__ import annotations

import threading

import pytest

from hpctrain.rank import group
from hpctrain.rank.group import read_collectives, summarize
from hpctrain.run.exit_record import Collectives


def entry(number, operation="nccl:all_reduce", *, retired=True, at=None, group=("0", "default_pg"), is_p2p=False):
    """As torch 2.13 writes it, without the fields that don't count."""
    return {
        "collective_seq_id": number,
        "profiling_name": operation,
        "process_group": list(group),
        "retired": retired,
        "time_created_ns": number if at is None else at,
        "is_p2p": is_p2p,
        "state": "scheduled",
    }


def test_what_is_finished_counts_and_the_oldest_that_isnt_is_the_one_that_is_waited_for():
    control = ("1", "control")
    found = summarize(
        [
            entry(118),
            entry(119, "nccl:broadcast", retired=False),
            entry(120, retired=False),
            entry(7, "gloo:all_reduce", group=control, retired=False, at=500),
        ]
    )
    assert found == Collectives({"nccl default_pg": 120, "gloo control": 7}, "nccl default_pg", "broadcast", 119)
    assert found.waits_on_nccl
    assert found.description == "broadcast (collective 119 of nccl default_pg)"


def test_a_message_on_the_cpu_isnt_on_the_device():
    found = summarize([entry(7, "gloo:gather", retired=False, group=("3", "undefined"))])
    assert (found.description, found.waits_on_nccl) == ("gather (collective 7 of gloo 3)", False)


def test_a_rank_that_waits_for_none_has_none():
    found = summarize([entry(1), entry(2), entry(9, retired=False, is_p2p=True)])
    assert (found.begun, found.description, found.waits_on_nccl) == ({"nccl default_pg": 2}, "", False)


def test_a_recorder_that_does_not_answer_is_not_waited_for(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", never.wait)
    assert read_collectives(within_s=0.1) is None
    never.set()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"entries": [{}]}'])
def test_a_recorder_with_another_format_is_left_alone(monkeypatch, text):
    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", lambda: text)
    assert read_collectives() is None


def test_a_recorder_that_is_switched_off_has_nothing(monkeypatch):
    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", lambda: b'{"version": "2.10"}')
    assert read_collectives() == Collectives()
    assert group.READ_S < 15, "the watchdog's bound on recording a hang"
