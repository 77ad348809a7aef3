"""Text of runs as textual shows it; and modal screens: a question before something is done, and a text."""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len, set_cell_size
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


def fitted(text: str, cells: int, *, right: bool = False, keep_end: bool = False) -> str:
    """A text in exactly this many cells of the terminal, cut with an ellipsis if it is too long.

    Args:
        text: may have control characters, which are escaped.
        cells: of the terminal; some characters take two.
        right: whether it is aligned to the right.
        keep_end: whether the beginning is cut, and not the end.
    """
    # few characters take no cell: of a text of millions, only these can be in sight
    text = text[-(4 * cells + 100) :] if keep_end else text[: 4 * cells + 100]
    text = visible(" ".join(text.split("\n")))
    length = cell_len(text)
    if length <= cells:
        return " " * (cells - length) + text if right else text + " " * (cells - length)
    if cells < 2:
        return set_cell_size(text, max(0, cells))
    if not keep_end:
        return set_cell_size(text, cells - 1) + "…"
    while cell_len(text) > cells - 1:
        text = text[1:]
    return set_cell_size("…" + text, cells)


class QuestionScreen(ModalScreen[bool]):
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


class TextScreen(ModalScreen[None]):
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
