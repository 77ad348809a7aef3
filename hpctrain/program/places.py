"""What the environment and the command of a program name, in the copy of its code."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.run.code import CodeSnapshot
from hpctrain.run.import_path import editable_places, in_copy, python_prefixes


def python_path(
    code: CodeSnapshot, word: str, variables: Mapping[str, str], places: Sequence[str] | None = None
) -> str:
    """Return PYTHONPATH for a program, which runs in the copy and finds its own folder by itself.

    Args:
        code: of the run.
        word: the first of the program's command.
        variables: with the PYTHONPATH of the original.
        places: of this process; None for its search path.
    """
    given = variables["PYTHONPATH"].split(os.pathsep) if variables.get("PYTHONPATH") else []
    found = [in_copy(code, str(code.submit_dir / place)) for place in given]
    if places is None:
        # without -P, Python has put the working directory first
        places = sys.path if sys.flags.safe_path else sys.path[1:]
    installed = editable_places(python_prefixes(word, variables, (code.submit_dir, code.root)))
    own = [copy for place in (*places, *installed) if (copy := in_copy(code, place)) != place]
    return os.pathsep.join(dict.fromkeys([*found, *own]))


def program_path(code: CodeSnapshot, variables: Mapping[str, str]) -> str:
    """Return PATH for a program: folders inside of the code are those of the copy."""
    places = variables["PATH"].split(os.pathsep)
    return os.pathsep.join(in_copy(code, place) if place.startswith("/") else place for place in places)


def command_in_copy(code: CodeSnapshot, command: Sequence[str]) -> list[str]:
    """Return a command with the copies of the files of the code that it names by absolute paths."""
    return [_file_in_copy(code, word) if word.startswith("/") else word for word in command]


def _file_in_copy(code: CodeSnapshot, word: str) -> str:
    parent, name = os.path.split(word)
    original = Path(os.path.realpath(parent), name)
    if not name or not original.is_relative_to(code.root):
        return word
    found = code.folder / original.relative_to(code.root)
    try:
        state = found.stat()
    except OSError:
        return word
    # what the program itself wrote into the copy isn't read-only, and what is linked isn't in the copy
    is_copied = stat.S_ISREG(state.st_mode) and not state.st_mode & 0o222
    return str(found) if is_copied and found.resolve().is_relative_to(code.folder.resolve()) else word
