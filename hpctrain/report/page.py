"""A page as HTML, escaped by construction: one file with its style sheet in it, which refers to no other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from hpctrain.phrases import counted, local_time
from hpctrain.startup import __version__
from hpctrain.terminal import CONTROL


class Markup(str):
    """Text that is HTML already; `element` and `joined` escape any other."""

    __slots__ = ()


def safe(text: object) -> str:
    """The text of a value, escaped for HTML, without characters that a page can't show or that turn its direction."""
    return escape(CONTROL.sub("\ufffd", str(text).replace("\r", "\n")))


def joined(parts: Iterable[object]) -> Markup:
    """Join parts, and escape those that aren't `Markup`."""
    return Markup("".join(part if isinstance(part, Markup) else safe(part) for part in parts))


def element(name: str, *inner: object, **attributes: object) -> Markup:
    """An element: ``element("p", "1 < 2", class_="note")`` is ``<p class="note">1 &lt; 2</p>``.

    Args:
        name: of the element; not escaped.
        inner: its content; parts that aren't `Markup` are escaped.
        attributes: values are escaped, and those that are None are left out. In a name, a `_` at the end is dropped,
            and any other is a `-`.
    """
    pairs = ((key, value) for key, value in attributes.items() if value is not None)
    attributes_text = "".join(f' {key.rstrip("_").replace("_", "-")}="{safe(value)}"' for key, value in pairs)
    return Markup(f"<{name}{attributes_text}>{joined(inner)}</{name}>")


STYLE = Path(__file__).with_name("style.css")
"""The style sheet. Its colours are those of Okabe and Ito, darkened or lightened until they stand out from the page.
Lines also differ by dashes, and bars by lightness or hatching, for grey prints. Charts are 320 units wide, in columns
of at least 296 px, so that no text is smaller than 11 px."""
# nothing may be loaded or executed, whatever the texts of a run contain
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, head: Markup, sections: Mapping[str, Markup]) -> str:
    """Return the text of a page.

    Args:
        title: of the window.
        head: what comes first, with the main heading.
        sections: the rest, by heading; those without content are left out.
    """
    footer = f"Written {local_time(time.time())} by hpctrain {__version__}"
    body = [
        element("header", head),
        *(element("section", element("h2", title), content) for title, content in sections.items() if content),
        element("footer", footer),
    ]
    top = [
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        element("style", Markup(STYLE.read_text(encoding="utf-8"))),
    ]
    document = element("html", element("head", *top), element("body", joined(body)), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


def folded(summary: str, *content: object, long: bool = False) -> Markup:
    """Content that a click opens; with ``long``, it isn't printed."""
    return element("details", element("summary", summary), *content, class_="long" if long else None)


def remark(text: str) -> Markup:
    """A paragraph that explains what is shown, or says what isn't."""
    return element("p", text, class_="faint")


def charts_in_rows(charts: Sequence[Markup], num_open: int, noun: str) -> list[Markup]:
    """Charts side by side; after the first ones, a click opens the others."""
    rows = [element("div", *charts[:num_open], class_="charts")]
    if later := charts[num_open:]:
        rows.append(folded(counted(len(later), f"more {noun}"), element("div", *later, class_="charts")))
    return rows


def facts(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Key figures, each in a box of its own."""
    return element("div", *(element("div", element("b", value), name) for name, value in pairs), class_="facts")


def descriptions(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Names with their values, a line for each; those without a value are left out."""
    lines = [element("dt", name) + element("dd", value) for name, value in pairs if value]
    return element("dl", *map(Markup, lines)) if lines else Markup("")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> Markup:
    """A table, which scrolls by itself where it is too wide.

    Args:
        head: the columns' names.
        rows: of cells.
        numbers: columns that are aligned to the right, counted from 0.
    """
    classes = ["number" if place in numbers else None for place in range(len(head))]

    def line(kind: str, cells: Sequence[str]) -> Markup:
        return element("tr", *(element(kind, cell, class_=class_) for cell, class_ in zip(cells, classes, strict=True)))

    body = element("tbody", *(line("td", row) for row in rows))
    return element("div", element("table", element("thead", line("th", head)), body), class_="scroll")
