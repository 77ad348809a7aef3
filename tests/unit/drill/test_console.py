from __future__ import annotations

import pytest

from hpctrain.drill.console import Console


class Stream:
    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(("terminal", "text"), [(True, "\r\x1b[Ka: step 1\r\x1b[Kdone\n"), (False, "done\n")])
def test_steps_are_shown_on_a_terminal_alone(terminal, text):
    stream = Stream(terminal)
    console = Console(stream)
    console.show_step("a", 1)
    console.show_step("a", 2)
    console.report("done")
    assert stream.text == text
