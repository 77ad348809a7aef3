"""Where the symbolic links of a launch's code lead in the copy."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path

from hpctrain.launch.code_choice import CodeFiles


class Links:
    """The symbolic links of the code.

    Args:
        found: the code, complete.
    """

    def __init__(self, found: CodeFiles) -> None:
        self._root = os.fspath(found.root)
        self._names_of_root: dict[str, bool] = {}
        self._passable = {*found.copied, *found.linked}
        self._folders = {".", *found.folders}

    def target(self, path: str, link: str) -> str:
        """Return a link's text in the copy: relative if the copy has its target, otherwise absolute.

        Args:
            path: of the link, relative to the root.
            link: its text in the original.
        """
        folder = f"{self._root}/{path}".rpartition("/")[0]
        target = os.path.normpath(link if link.startswith("/") else f"{folder}/{link}")
        inside = self._inside(target)
        if inside is None or (not self._is_in_copy(inside) and os.path.lexists(f"{self._root}/{inside}")):
            return target
        return os.path.relpath(f"{self._root}/{inside}", folder)

    def _inside(self, target: str) -> str | None:
        """Return a path relative to the root; None outside of it. The root may have other names."""
        above, names = target, ""
        while not self._is_root(above):
            above, _, name = above.rpartition("/")
            names = f"{name}/{names}"
            if not above:
                return None
        return names.removesuffix("/") or "."

    def _is_root(self, folder: str) -> bool:
        if folder == self._root:
            return True
        if (known := self._names_of_root.get(folder)) is None:
            try:
                known = Path(folder).samefile(self._root)
            except OSError:
                known = False
            self._names_of_root[folder] = known
        return known

    def _is_in_copy(self, path: str) -> bool:
        """Whether the copy has a path, which may lead through a link."""
        places = accumulate(path.split("/"), "{}/{}".format)
        return path in self._folders or any(place in self._passable for place in places)
