"""The code of a run, as far as it was recorded, and how that of two runs differs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.run.code import current_code
from hpctrain.run.directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCode:
    """What is known of a run's code; None for what wasn't recorded.

    Attributes:
        digest: of the copy.
        commit: of git.
        changes: the uncommitted changes, as git prints them; empty for none.
    """

    digest: str | None = None
    commit: str | None = None
    changes: str | None = None

    @classmethod
    def read(cls, directory: RunDirectory) -> RecordedCode:
        """Read what the run recorded."""
        copy = None
        with contextlib.suppress(OSError, RunDirectoryError):
            copy = current_code(directory)
        git = read_json_or_empty(directory.manifest).get("git")
        git = git if isinstance(git, dict) else {}
        commit, changes = _text(git.get("commit")), _text(git.get("diff"))
        if git.get("diff_left_out"):
            changes = None
        if copy is None:
            return cls(commit=commit, changes=changes)
        # a copy that a resume took later has a commit of its own, and its changes weren't recorded
        same = not copy.commit or copy.commit == commit
        return cls(digest=copy.digest, commit=copy.commit or commit, changes=changes if same else None)

    def differences(self, other: RecordedCode) -> dict[str, tuple[Any, Any]]:
        """Return what differs by name, as far as both runs recorded it."""
        if self.digest is not None and other.digest is not None:
            return {"digest": (self.digest, other.digest)} if self.digest != other.digest else {}
        pairs = {"commit": (self.commit, other.commit), "uncommitted changes": (self.changes, other.changes)}
        return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}

    def is_unknown_beside(self, other: RecordedCode) -> bool:
        """Whether too little was recorded of this code to tell that it is the same as the other's."""
        if self.digest is not None and other.digest is not None:
            return False
        return self.commit is None or self.changes is None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
