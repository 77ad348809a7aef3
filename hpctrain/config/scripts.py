"""The scripts in a command: which interpreter each one needs, and whether it is there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.streams import Printer

INTERPRETERS = {
    ".py": "python",
    ".sh": "bash",
    ".jl": "julia",
    ".R": "Rscript",
    ".pl": "perl",
    ".rb": "ruby",
    ".lua": "lua",
}
"""Programs that run scripts, by the suffix of the script."""
READERS = ("python", "bash", "sh", "zsh", "julia", "Rscript", "perl", "ruby", "lua")
"""Programs whose first word that isn't an option is a script."""
PLAIN_OPTIONS = ("-u", "-O", "-B", "-I", "-s", "-E", "-e", "-x", "-v", "-l", "-eu", "-ex", "-eux", "-ux")
"""Options of these programs that take no value."""
STARTERS = (*READERS, "torchrun", "accelerate", "deepspeed", "srun", "mpirun", "uv", "poetry", "conda")
"""Programs that run scripts, with options that hpctrain doesn't know."""
SHEBANG_BYTES = 200


def interpreter_of(script: str) -> str:
    """The program that runs a script: by its suffix, otherwise by its first line, otherwise bash."""
    if (known := INTERPRETERS.get(Path(script).suffix)) is not None:
        return known
    try:
        with Path(script).open("rb") as file:
            line = file.readline(SHEBANG_BYTES)
    except OSError:
        return "bash"
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    names = [Path(word).name for word in words if not word.startswith("-")]
    names = names[1:] if names[:1] == ["env"] else names
    return names[0] if names else "bash"


def near_script(word: str) -> str | None:
    """The script whose name was probably meant; None if no name in that folder is similar."""
    path = Path(word)
    try:
        names = [other.name for other in path.parent.iterdir() if other.suffix == path.suffix]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return str(path.with_name(near[0])) if near else None


def refuse_missing_script(command: Sequence[str], warn: Printer) -> None:
    """Refuse a command whose script isn't there, before its job waits in the queue.

    Args:
        command: the program and its arguments; one that a value of `args` completes isn't checked.
        warn: gets a line where the word might be something else, or the file only on the nodes.

    Raises:
        ConfigError: an interpreter's script isn't in the working directory.
    """
    program = program_name(command[0])
    if program not in STARTERS:
        return
    word, is_script = _first_script(program, command[1:])
    if word is None or "{args" in word or Path(word).exists():
        return
    near = near_script(word)
    remedy = f"did you mean {near}?" if near else "correct its path, or type this where it is"
    if is_script and not Path(word).is_absolute():
        raise ConfigError("run.command", word, "there is no such file in this folder", remedy)
    warn(f"{word} doesn't exist on this machine; {remedy}")


def program_name(program: str) -> str:
    """Return a program's name, without its folder and the version of `python3.11`."""
    return Path(program).name.rstrip("0123456789.") or program


def _first_script(program: str, words: Sequence[str]) -> tuple[str | None, bool]:
    """The first word that looks like a script, and whether it certainly is one."""
    is_certain = program in READERS
    for word in words:
        if re.fullmatch("-[a-zA-Z]*[cm]", word):
            return None, False
        if word.startswith("-"):
            is_certain = is_certain and word in PLAIN_OPTIONS
        elif Path(word).suffix in INTERPRETERS:
            return word, is_certain
        else:
            is_certain = False
            if program in READERS:  # its script has another suffix, or it is the value of an option
                return None, False
    return None, False
