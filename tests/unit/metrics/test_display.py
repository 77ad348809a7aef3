from __future__ import annotations

import io

import pytest

from hpctrain.metrics.progress import Display


class OnlyWrites:
    """A stream of a program that can't do more."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_characters_that_the_encoding_lacks_are_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Display(stream).put("eval/präzision 0.5\n")
    assert stream.buffer.getvalue() == b"eval/pr\\xe4zision 0.5\n"


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [closed(), None, OnlyWrites(), io.TextIOWrapper(io.BufferedReader(io.BytesIO()))])
def test_whatever_fails_ends_the_display_with_one_warning(caplog, stream):
    display = Display(stream)
    display.put("a")
    display.put("b")
    (record,) = caplog.records
    assert record.getMessage().startswith("can no longer show progress (")
