"""Verify a checkpoint by all ranks, each the files that it will read if the mesh is that of the save."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.rank.world import World
from hpctrain.run.checkpoints import Problem, ShowRead, wrong_files

_WRITER = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")


class SharedVerification:
    """Verifies checkpoints by all ranks, while rank zero chooses one.

    Rank zero calls it for each checkpoint that it considers, and then `end`. The other ranks call `join` meanwhile.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, path: Path, files: Mapping[str, Any], show: ShowRead | None) -> list[Problem]:
        """Verify a checkpoint, on rank zero.

        Args:
            path: its directory.
            files: the entries of its manifest, by name.
            show: called while this rank reads its share.
        """
        self._world.broadcast([str(path), dict(files)])
        found = self._world.gather(self._verified(path, files, show))
        assert found is not None
        return [Problem(text, unreadable) for own in found for text, unreadable in own]

    def end(self) -> None:
        """Let the other ranks go; rank zero calls it once it has chosen."""
        self._world.broadcast(None)

    def join(self) -> None:
        """Verify what rank zero asks for until it has chosen, on every other rank."""
        while (asked := self._world.broadcast(None)) is not None:
            path, files = asked
            self._world.gather(self._verified(Path(path), files, None))

    def _verified(self, path: Path, files: Mapping[str, Any], show: ShowRead | None) -> list[tuple[str, bool]]:
        own = {name: entry for name, entry in files.items() if self._reader(name) == self._world.rank}
        try:
            problems = wrong_files(path, own, show=show)
        except OSError as error:
            # every rank must take part in the exchange that follows
            problems = [Problem(f"rank {self._world.rank} can't read it: {error.strerror}", unreadable=True)]
        return [(problem.text, problem.unreadable) for problem in problems]

    def _reader(self, name: str) -> int:
        """The rank that verifies a file: the one that wrote it, in a world as large as that of the save."""
        writer = _WRITER.fullmatch(name)
        return 0 if writer is None else int(writer["rank"]) % self._world.size
