"""Ranks send each other values, and never a pickle."""

from __future__ import annotations


def test_values_arrive_at_rank_zero_and_from_it(ranks):
    done = ranks("messaging:be_rank", world_size=3)
    assert [process.code for process in done] == [0, 0, 0], "\n".join(process.output for process in done)
    sent = {"from": 0, "text": "ä" * 5}
    assert done[0].result == {"gathered": [[0, 0, None], [1000, 1, None], [2000, 2, None]], "alike": True, "sent": sent}
    assert [process.result["sent"] for process in done[1:]] == [sent, sent]


def test_control_messages_beside_a_group_of_the_devices_use_only_addresses_that_ranks_have_sealed(ranks):
    done = ranks("messaging:be_rank_with_device_group", world_size=2)
    assert [process.code for process in done] == [0, 0], "\n".join(process.output for process in done)
    assert [process.result for process in done] == [
        {"gathered": gathered, "used": True, "unsealed": []} for gathered in ([0, 1], None)
    ]


def test_a_pickle_from_another_rank_is_not_opened(ranks, tmp_path):
    done = ranks("messaging:be_betrayed", str(tmp_path / "opened"), world_size=2)
    assert "error" in done[0].result, done[0].output
    assert not (tmp_path / "opened").exists()
