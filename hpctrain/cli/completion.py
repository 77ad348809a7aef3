"""Print the shell code that completes hpctrain's command line.

examples:
  eval "$(hpctrain completion bash)"     # in ~/.bashrc
  eval "$(hpctrain completion zsh)"      # in ~/.zshrc

Tab completes commands, groups and their options, keys, and the runs under runs/. Each Tab runs hpctrain for about
0.2 s, without torch; it imports nothing from the working directory.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpctrain.cli import COMMANDS
from hpctrain.cli.arguments import command_parser
from hpctrain.errors import ExitCode

BASH = """\
_hpctrain() {
    local line=${COMP_LINE:0:COMP_POINT} word words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[${#words[@]}-1]}
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion query "${words[@]:1}" 2>/dev/null))
    # readline replaces only what follows the last = of the word
    [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
}
complete -o nospace -o default -F _hpctrain hpctrain
"""
ZSH = """\
_hpctrain() {
    local -a found
    found=("${(@f)$("${words[1]}" completion query "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
    if [[ -n $found[1] ]]; then compadd -Q -S '' -- "${found[@]}"; else _files; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _hpctrain hpctrain
"""
SHELLS = {"bash": BASH, "zsh": ZSH}
TAKE_FOLDER = ("--config-dir", "-cd", "--runs-dir")
UNQUOTED = re.compile(r"[\w./=,+@%:~-]+ ?")
"""Candidates that a shell takes as they are: others, which it might execute after Enter, are left out."""
FLAGS = ("--config-dir", "--cfg", "--help", "--multirun", "--version")


def main(arguments: list[str]) -> int:
    """Print the shell code, or the candidates that it queries; ``arguments`` are those after `completion`."""
    if arguments[:1] == ["query"]:
        with contextlib.suppress(OSError, ValueError):
            print("\n".join(candidates(arguments[1:])))
        return ExitCode.FINISHED
    parser = command_parser("completion", __doc__)
    parser.add_argument("shell", choices=SHELLS)
    print(SHELLS[parser.parse_args(arguments).shell], end="")
    return ExitCode.FINISHED


def candidates(words: Sequence[str]) -> list[str]:
    """Return what the last word may become: whole words end with a space, keys with `=`, groups with a dot or `=`.

    Args:
        words: those after `hpctrain`; the last one is being typed, and may be empty.
    """
    *before, word = words or [""]
    if before and before[-1] in TAKE_FOLDER:
        return []  # the shell completes it as a file
    command = before[0] if before and before[0] in COMMANDS else None
    names: list[str] = []
    if not before:
        names += _whole(COMMANDS, word)
    if command == "completion":
        names += _whole(SHELLS, word)
    if word.startswith("-"):
        return _whole(FLAGS, word) if command is None else []
    kinds = "keys" if command is None else COMMANDS[command]
    if "runs" in kinds:
        names += _runs(before, word)
    if "keys" in kinds:
        names += _overrides(before, word)
    # a run in a shared folder, or a file in ./conf, may be named by another user
    # a list of options begins with a bracket that its user has typed
    return sorted(name for name in names if UNQUOTED.fullmatch(name.replace("=[", "=", 1)))


def _whole(names: Iterable[str], word: str) -> list[str]:
    return [f"{name} " for name in names if name.startswith(word)]


def _runs(before: Sequence[str], word: str) -> list[str]:
    from hpctrain.status.runs import find_runs

    folder = before[before.index("--runs-dir") + 1] if "--runs-dir" in before[:-1] else "runs"
    return _whole((os.path.relpath(run.path) for run in find_runs(Path(folder))), word)


def _overrides(before: Sequence[str], word: str) -> list[str]:
    from hpctrain.config.paths import conf_dir, groups_of, keys_of, options_of, own_folders, top_level_keys
    from hpctrain.config.root import LIST_GROUPS

    config_dirs = [before[number + 1] for number, flag in enumerate(before[:-1]) if flag in TAKE_FOLDER[:2]]
    flag_folder, here = own_folders(config_dirs[0] if config_dirs and Path(config_dirs[0]).is_dir() else None)
    folders = [folder for folder in (flag_folder, conf_dir(), here) if folder is not None]
    override = word.lstrip("+~")
    mark = word[: len(word) - len(override)]
    key, equals, _ = override.partition("=")
    if equals and key in LIST_GROUPS and word.partition("=")[2].startswith("["):
        prefix = word[: max(word.rindex("["), word.rfind(",")) + 1]
        return [f"{prefix}{option}" for option in options_of(key, folders) if f"{prefix}{option}".startswith(word)]
    if equals:
        return _whole((f"{mark}{key}={option}" for option in options_of(key, folders)), word)
    group, dot, _ = override.partition(".")
    if dot:
        options = [argument.partition("=")[2] for argument in before if argument.startswith(f"{group}=")]
        names = [f"{name}=" for name in keys_of(group, options[-1] if options else None, folders)]
    else:
        groups = groups_of(folders)
        names = [f"{name}=" for name in [*groups, *top_level_keys()]]
        names += [f"{name}." for name in groups if name != "experiment"]
    return [f"{mark}{name}" for name in names if name.startswith(override)]
