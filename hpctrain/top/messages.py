"""Text of runs as textual shows it; and modal screens: a question before something is done, and a text."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from hpctrain.terminal import visible

LONGEST = 20_000
"""Characters of a text that are shown: a metric's name may have millions."""


def plain(text: str) -> Content:
    """Text that others wrote, for any widget: a plain string would be parsed as markup, which may hold actions."""
    return Content(visible(text[:LONGEST]))


class Question(ModalScreen[bool]):
    """A question that is answered with y or n.

    Args:
        text: of the question.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Make the box."""
        with Vertical(classes="box"):
            yield Static(plain(self._text))
            yield Static("y  yes        n  no", classes="keys")

    def action_answer(self, answer: bool) -> None:
        """Close with the answer."""
        self.dismiss(answer)


class Text(ModalScreen[None]):
    """A text that any of the usual keys closes.

    Args:
        title: its first line.
        text: may be longer than the screen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,question_mark", "dismiss", "Close")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        """Make the box."""
        with VerticalScroll(classes="box"):
            yield Static(plain(self._title), classes="title")
            yield Static(plain(self._text))
            yield Static("Esc  close", classes="keys")
