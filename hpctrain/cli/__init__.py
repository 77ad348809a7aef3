"""The command line: subcommands by their first word, and training for everything else."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Sequence

from hpctrain.errors import ExitCode, HpctrainError

COMMANDS = ("cancel", "drill", "env", "fit-batch", "inspect", "logs", "resume", "stacks", "status")
"""Words that are commands, one module of this package each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was typed.

    Args:
        arguments: the words after the program's name; None for those of this process.

    Returns:
        An `ExitCode`.
    """
    code = _answer(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None and code == ExitCode.INTERRUPTED and _is_busy():
        from hpctrain.worker.entry import end_process

        end_process(code)
    return code


def _is_busy() -> bool:
    """Whether this process would stay for something: after a second Ctrl-C, a checkpoint that is being written."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _answer(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except HpctrainError as error:
        print(f"hpctrain: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # the reader of a pipe, head say, has enough; nothing can be flushed to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FINISHED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in COMMANDS:
        code: int = importlib.import_module(f"hpctrain.cli.{first.replace('-', '_')}").main(words[1:])
        return code
    if first and "=" not in first and not first.startswith(("-", "~")):
        raise UnknownCommandError(first)
    if first == "--version":
        import hpctrain

        print(hpctrain.__version__)
        return ExitCode.FINISHED
    from hpctrain.cli.train import main as train

    return train(words)


class UnknownCommandError(HpctrainError):
    """A first word that is neither a command nor KEY=VALUE."""

    exit_code = ExitCode.BAD_CONFIGURATION

    def __init__(self, word: str) -> None:
        known = ", ".join(COMMANDS)
        super().__init__(
            f"{word}: no such command; known are {known}; what trains is written as KEY=VALUE (see --help)"
        )
