"""Screens above the others: a question before something is done, and a text."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from hpctrain.terminal import visible


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
            yield Static(visible(self._text), markup=False)
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
            yield Static(visible(self._title), markup=False, classes="title")
            yield Static(visible(self._text), markup=False)
            yield Static("Esc  close", classes="keys")
