from __future__ import annotations

from hpctrain.worker.silence import Silence


def test_silence_adds_up_until_the_mark_changes():
    silence = Silence(now=100.0, longest_gap_s=2.0)
    looks = [(1, 101.0), (1, 102.0), (1, 103.5), (2, 104.0), (2, 105.0), (1, 106.0)]
    assert [silence.look(mark, now) for mark, now in looks] == [0.0, 1.0, 2.5, 0.0, 1.0, 0.0]


def test_a_process_that_was_suspended_did_not_hang():
    silence = Silence(now=0.0, longest_gap_s=2.0)
    silence.look("mark", 1.0)
    assert silence.look("mark", 7200.0) == 2.0
    assert silence.look("mark", 7201.0) == 3.0
