from __future__ import annotations

import pytest

from hpctrain.errors import RunDirectoryError
from hpctrain.run.stacks import StacksRequests, answer, framed, request_stacks


def test_each_request_is_seen_once(tmp_path):
    path = tmp_path / "request"
    requests = StacksRequests(path)
    assert requests.new() is None
    first = request_stacks(path)
    assert (requests.new(), requests.new()) == (first, None)
    second = request_stacks(path)
    assert second != first
    assert (requests.new(), requests.new()) == (second, None)


def test_a_request_from_before_is_answered_too(tmp_path):
    token = request_stacks(tmp_path / "request")
    assert StacksRequests(tmp_path / "request").new() == token


def test_a_request_that_cannot_be_left_is_an_error_that_names_the_place(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"gone/request: can't be written \(No such file"):
        request_stacks(tmp_path / "gone" / "request")
    assert list(tmp_path.iterdir()) == []


def test_an_answer_is_found_among_others_and_only_when_it_is_complete(tmp_path):
    path = tmp_path / "stacks"
    assert answer(path, "aa") is None
    (begin_old, end_old), (begin, end) = framed("rank 0, earlier", "aa"), framed("rank 0", "bb")
    path.write_text(f"{begin_old}old\n{end_old}{begin}File one\n")
    assert answer(path, "bb") is None
    with path.open("a") as file:
        file.write(f"File two\n{end}{begin_old}again\n{end_old}")
    assert answer(path, "bb") == "==== rank 0 [bb]\nFile one\nFile two\n"
    assert answer(path, "aa") == "==== rank 0, earlier [aa]\nold\n"
