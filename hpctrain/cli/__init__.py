"""The command line: run the command that the first argument names; without one, train."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import sys
import threading
from collections.abc import Sequence

from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.startup import __version__
from hpctrain.streams import discard_output, open_streams
from hpctrain.terminal import guard_output, is_terminal

COMMANDS = {
    "best": "runs",
    "cancel": "runs",
    "compare": "runs",
    "completion": "",
    "doctor": "keys",
    "drill": "keys",
    "env": "",
    "export": "runs",
    "fit-batch": "keys",
    "inspect": "runs",
    "logs": "runs",
    "report": "runs",
    "resume": "runs keys",
    "run": "",
    "stacks": "runs",
    "status": "runs",
    "sync": "runs",
    "top": "runs",
}
"""The commands, each a module of this package, and which of their words Tab completes."""
WRITING_THREAD = "checkpoint"
"""The name of the thread that writes a checkpoint (`hpctrain.checkpoint.saver`)."""
PROGRAMS = ("python", "python3", "bash", "sh", "torchrun", "accelerate", "deepspeed")
"""Programs that a user may type as a first word, instead of after `run --`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line: the command that the first argument names, or a training.

    Args:
        arguments: the arguments after the program's name; None means `sys.argv[1:]`.

    Returns:
        An `ExitCode`.
    """
    open_streams()
    if arguments is None:  # the streams of a program that calls this are its own
        guard_output()
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None:
        _skip_python_exit(code)
    return code


def _skip_python_exit(code: int) -> None:
    """End the process by os._exit after a second Ctrl-C, or once its GPU is lost; otherwise do nothing."""
    threads = [thread for thread in threading.enumerate() if not (thread.daemon or thread is threading.main_thread())]
    lost_gpu = sys.modules.get("hpctrain.attempt.lost_gpu")
    is_lost = lost_gpu is not None and lost_gpu.has_lost_gpu()
    # after a second Ctrl-C, a thread may still be writing a checkpoint: Python would wait for it
    is_urgent = code == ExitCode.INTERRUPTED
    if not (is_lost or (is_urgent and threads)):
        return
    from hpctrain.rank.entry import end_process

    with contextlib.suppress(KeyboardInterrupt):
        for thread in threads:
            # those of a task's own pool would never end
            if thread.name == WRITING_THREAD and not is_urgent:
                thread.join()
    end_process(code)


def _run(arguments: list[str]) -> int:
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except HpctrainError as error:
        _print_error(str(error))
        return error.exit_code
    except BrokenPipeError:
        # the reader of the pipe, such as head, has exited; Python's flush at exit would fail too
        discard_output(sys.stdout)
        discard_output(sys.stderr)
        return ExitCode.FINISHED
    except OSError as error:
        _flush_output()
        # imported only now: on a busy login node, each module costs time
        from hpctrain.run.file_system import explain

        _print_error(explain(error))
        return ExitCode.FAILED
    except KeyboardInterrupt:
        end_echoed_line()
        return ExitCode.INTERRUPTED


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:  # on a full disk, Python's flush at exit would fail
        discard_output(sys.stdout)


def _print_error(text: str) -> None:
    try:
        print(f"{ERROR_PREFIX}{text}", file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)


def end_echoed_line() -> None:
    """Start a new line after the ^C that a terminal echoes."""
    if is_terminal(sys.stderr):
        print(file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    # import only the modules that the command needs: on a busy login node, each one costs time
    if first in COMMANDS:
        code: int = importlib.import_module(f"hpctrain.cli.{first.replace('-', '_')}").main(arguments[1:])
        return code
    if first and "=" not in first and not first.startswith(("-", "~")):
        remedy = f"the commands are {', '.join(COMMANDS)}; to train, write KEY=VALUE (see --help)"
        if "." in first or "/" in first:
            remedy = f"to run a program, write python -m hpctrain run -- python {first} ..."
        elif first in PROGRAMS:
            remedy = f"to run a program, write python -m hpctrain run -- {shlex.join(arguments)}"
        print(f"{ERROR_PREFIX}{first} is not a command; {remedy}", file=sys.stderr)
        return ExitCode.BAD_CONFIGURATION
    if first == "--version":
        print(__version__)
        return ExitCode.FINISHED
    from hpctrain.cli.train import main as train

    return train(arguments)
