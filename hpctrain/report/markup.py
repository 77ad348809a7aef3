"""HTML and SVG as text, escaped by construction."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

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
    given = ((key, value) for key, value in attributes.items() if value is not None)
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{safe(value)}"' for key, value in given)
    return Markup(f"<{name}{shown}>{joined(inner)}</{name}>")
