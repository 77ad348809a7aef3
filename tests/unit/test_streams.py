from __future__ import annotations

import io
import sys

import pytest

from hpctrain.streams import flush_output, missing_output_discarded


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, object(), closed()], ids=["none", "no flush", "closed"])
def test_output_is_flushed_as_far_as_it_can_be(monkeypatch, stream):
    rest = io.TextIOWrapper(io.BytesIO())
    rest.write("x")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", rest)
    flush_output()
    assert rest.buffer.getvalue() == b"x"


@pytest.mark.parametrize("stream", [None, closed()], ids=["none", "closed"])
def test_a_missing_stream_is_there_for_a_while(monkeypatch, capsys, stream):
    errors = sys.stderr
    monkeypatch.setattr(sys, "stdout", stream)
    with missing_output_discarded():
        print("a", file=sys.stdout)
        assert sys.stderr is errors
    assert sys.stdout is stream
