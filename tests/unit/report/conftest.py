"""Pages, read as a browser reads them."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

VOID = {"meta"}
REFERRING = {"src", "href", "srcset", "data", "poster", "action", "xlink:href"}


class Page(HTMLParser):
    """A page: its texts and elements; unbalanced tags and references to anything outside fail."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "use", "image", "base", "a"}, tag
        assert not REFERRING & dict(attrs).keys(), attrs
        assert not any(name.startswith("on") for name, _ in attrs), attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] == ["h2"]:
            self.headings.append(data)
        if "style" in self._open:
            assert "url(" not in data
            assert "@import" not in data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All texts."""
        return " ".join(" ".join(self.texts).split())

    def count(self, tag: str, **attributes: str) -> int:
        """How many elements have these attributes."""
        return sum(tag == one and attributes.items() <= found.items() for one, found in self.elements)


@pytest.fixture
def read_page():
    """Read a page."""
    return Page
