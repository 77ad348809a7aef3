"""The command of a program: its scripts, and a launcher such as torchrun that starts the ranks itself."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    if (interpreter := INTERPRETERS.get(Path(script).suffix)) is not None:
        return interpreter
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
        names = [file.name for file in path.parent.iterdir() if file.suffix == path.suffix]
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


_OF_A_NODE = {
    **dict.fromkeys(("torchrun", "accelerate-launch", "deepspeed", "composer"), ""),
    **dict.fromkeys(("colossalai", "fabric", "lightning"), "run"),
    "accelerate": "launch",
}
_OF_A_JOB = {
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun", "horovodrun"), ""),
    **dict.fromkeys(("srun", "jsrun", "aprun"), ""),
    "torchx": "run",
}
_PROGRAMS = {**_OF_A_NODE, **_OF_A_JOB}
"""Launchers and the subcommand with which they start ranks; without one, they always do."""
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "composer.cli.launcher": "composer",
    "horovod.runner.launch": "horovodrun",
}
"""Launchers, by the module that `python -m` runs."""
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash")
_PREFIXES = {
    **dict.fromkeys(("nohup", "setsid", "exec", "command", "busybox", "tini", "dumb-init", "valgrind"), (0, "")),
    "env": (0, "-u --unset -C --chdir"),
    "sudo": (0, "-u --user -g --group"),
    "nice": (0, "-n --adjustment"),
    "ionice": (0, "-c --class -n --classdata"),
    "time": (0, "-f --format -o --output"),
    "timeout": (1, "-k --kill-after -s --signal"),
    "stdbuf": (0, "-i --input -o --output -e --error"),
    "taskset": (1, ""),
    "chrt": (1, ""),
    "numactl": (0, "-i --interleave -N --cpunodebind -m --membind -C --physcpubind -p --preferred"),
    "uv": (1, "-p --python --with --with-requirements --env-file --extra --group --directory --project --package"),
    **dict.fromkeys(("poetry", "pdm", "pipenv", "rye", "hatch"), (1, "-C --directory -P --project -p -e --env")),
    "pixi": (1, "-e --environment --manifest-path"),
    **dict.fromkeys(("conda", "mamba", "micromamba"), (1, "-n --name -p --prefix --cwd")),
    **dict.fromkeys(
        ("singularity", "apptainer"),
        (2, "-B --bind -H --home --env --env-file -W --workdir --pwd --cwd -o --overlay -S --scratch --app --mount"),
    ),
    **dict.fromkeys(
        ("docker", "podman"),
        (2, "-v --volume -e --env --env-file -w --workdir --gpus --name --network --ipc --shm-size -u --user --mount"),
    ),
    "enroot": (2, "-m --mount -e --env -c --conf"),
    "nsys": (1, "-o --output -t --trace -s --sample -c --capture-range -f --force-overwrite"),
    "ncu": (0, "-o --export --set -k --kernel-name -c --launch-count"),
    "strace": (0, "-o -e -p"),
    "py-spy": (1, "-o --output -f --format -r --rate -d --duration"),
}
"""Programs that run another one: the number of words before that one, and the options that take a value."""
_SPANS_NODES = re.compile(
    r"--(nnodes|node[-_]rank|rdzv[-_]\w+|num[-_](machines|nodes)|machine[-_]rank|config[-_]file|hostfile)\b|.*\$"
)
"""Options that connect the launchers of several nodes; a variable of the shell may contain one."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_KEYWORDS = ("export", "if", "then", "elif", "else", "while", "until", "do", "{", "!", "time")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?([^\n]*)\n.*?\n\s*\1[ \t]*$", re.MULTILINE | re.DOTALL)
_SEARCHED = re.compile(r"\$\((?:which|command -v|type -p) ([^()]+)\)|`which ([^`]+)`")
_VARIABLE = re.compile(r"\$\{?(\w+|@|\*)(?:\[[@*]\])?\}?")
_SEPARATORS = ";&|()\n"
MAX_SCRIPT_BYTES = 2**16
MAX_DEPTH = 3
"""Scripts that are read, each of which is called by the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLauncher:
    """A launcher in the command of a program.

    Attributes:
        name: as users know it, such as `accelerate launch`.
        words: the arguments after it.
        script: the shell script that calls it; empty if the command itself does.
        is_certain: whether the command always runs it, and not only in a branch of shell code.
    """

    name: str
    words: tuple[str, ...]
    script: str = ""
    is_certain: bool = True

    @property
    def starts_whole_job(self) -> bool:
        """Whether it starts the ranks of all nodes rather than those of one."""
        return self.name.partition(" ")[0] in _OF_A_JOB

    @property
    def spans_nodes(self) -> bool:
        """Whether its arguments, as far as they are known, connect it to the launchers of other nodes."""
        return any(_SPANS_NODES.match(word) for word in self.words)

    @classmethod
    def of(cls, command: Sequence[str], *, depth: int = 0) -> RankLauncher | None:
        """Return the launcher that a command runs; None if it runs none that can be seen.

        Args:
            command: of the run. A shell script in it is read if it is in this folder.
            depth: number of scripts that lead to the command.
        """
        words = list(command)
        while words and words[0]:
            word, name, words = words[0], program_name(words[0]), words[1:]
            if name in _PROGRAMS:
                return _launcher(name, words)
            if name == "python":
                return _in_python(words)
            if name in _SHELLS:
                return _in_shell(words, depth)
            if name == "eval":
                return _in_text(" ".join(words), (), depth)
            if name not in _PREFIXES:
                return _in_script(word, words, depth) if "/" in word else None
            words = _without_options(words, *_PREFIXES[name])
        return None


def _launcher(name: str, words: Sequence[str]) -> RankLauncher | None:
    if subcommand := _PROGRAMS.get(name, ""):
        if not words or words[0] != subcommand:
            return None
        name, words = f"{name} {subcommand}", words[1:]
    if words and words[0] in ("-h", "--help", "--version"):
        return None
    return RankLauncher(name=name, words=tuple(words))


def _without_options(words: Sequence[str], num_words: int, with_value: str) -> list[str]:
    """Drop the options, words and variables of a prefix such as `timeout 60`; return the command that it runs."""
    command, options = list(words), with_value.split()
    while command:
        if command[0].startswith("-"):
            del command[: 2 if command[0] in options else 1]
        elif _ASSIGNMENT.fullmatch(command[0]):
            del command[0]
        elif num_words:
            num_words -= 1
            del command[0]
        else:
            break
    return command


def _in_python(words: Sequence[str]) -> RankLauncher | None:
    arguments = list(words)
    while arguments:
        word = arguments.pop(0)
        if not word.startswith("-"):
            as_module = str(Path(word).with_suffix("")).replace("/", ".")
            launcher = next((name for module, name in _MODULES.items() if as_module.endswith(f".{module}")), None)
            launcher = launcher or (Path(word).name if Path(word).name in _PROGRAMS else None)
            return None if launcher is None else _launcher(launcher, arguments)
        for place, letter in enumerate(word[1:], start=2):
            if letter == "c":
                return None
            if letter in "mWX":
                argument = word[place:] or (arguments.pop(0) if arguments else "")
                if letter == "m":
                    return _launcher(_MODULES[argument], arguments) if argument in _MODULES else None
                break
    return None


def _in_shell(words: Sequence[str], depth: int) -> RankLauncher | None:
    arguments, is_text = list(words), False
    while arguments and arguments[0][:1] in ("-", "+"):
        option = arguments.pop(0)
        is_text = is_text or ("c" in option and not option.startswith("--"))
        if option.endswith(("o", "O")) and not option.startswith("--"):
            del arguments[:1]
    if not arguments:
        return None
    if is_text:
        return _in_text(arguments[0], arguments[2:], depth)
    return _in_script(arguments[0], arguments[1:], depth, is_shell=True)


def _in_script(word: str, arguments: Sequence[str], depth: int, *, is_shell: bool = False) -> RankLauncher | None:
    if depth == MAX_DEPTH:
        return None
    try:
        with Path(word).open("rb") as file:
            data = file.read(MAX_SCRIPT_BYTES)
    except OSError:
        return None
    first, _, _ = data.partition(b"\n")
    shells = [name for name in _SHELLS if re.search(rf"\b{name}\b".encode(), first)]
    if b"\0" in data or not (is_shell or (first.startswith(b"#!") and shells)):
        return None
    launcher = _in_text(data.decode(errors="replace"), arguments, depth + 1)
    return None if launcher is None else replace(launcher, script=launcher.script or word)


def _in_text(text: str, arguments: Sequence[str], depth: int) -> RankLauncher | None:
    """The launcher that shell code runs; of several, the first that it always runs."""
    uncertain: RankLauncher | None = None
    for words, is_certain in _simple_commands(text, arguments):
        launcher = RankLauncher.of(words, depth=depth)
        if launcher is not None and is_certain and launcher.is_certain:
            return launcher
        uncertain = uncertain or launcher
    return None if uncertain is None else replace(uncertain, is_certain=False)


def _simple_commands(text: str, arguments: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield the commands of shell code, each with whether it always runs; the bodies of loops count as always run."""
    depth, separator, words, was_test = 0, "", list[str](), False
    variables = {"@": list(arguments), "*": list(arguments)}
    for token in [*_tokens(text), "\n"]:
        if not set(token) <= set(_SEPARATORS):
            words.append(token)
            continue
        is_certain = not depth and separator != "||" and not (separator == "&&" and was_test)
        while words and (words[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(words[0])):
            name, is_assignment, text = words.pop(0).partition("=")
            depth += name == "if"
            variables |= {name: text.split()} if is_assignment else {}
        words = [part for word in words for part in _expanded(word, variables)]
        if words:
            depth += {"case": 1, "fi": -1, "esac": -1}.get(words[0], 0)
            was_test = words[0] in ("[", "[[", "test")
            yield words, is_certain and not depth
        separator, words = token, []


def _expanded(word: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words of a variable of the script; a variable from elsewhere stays as it is."""
    variable = _VARIABLE.fullmatch(word)
    return [word] if variable is None else variables.get(variable[1], [word])


def _tokens(text: str) -> list[str]:
    text = _HERE_DOCUMENT.sub(r"\2", _COMMENT.sub("", text.replace("\\\n", " ")))
    text = _SEARCHED.sub(lambda match: match[1] or match[2], text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        return list(lexer)
    except ValueError:  # unbalanced quotes
        return [token for line in text.split("\n") for token in (*line.split(), "\n")]
