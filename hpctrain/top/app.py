"""The application: its screens, the threads that read files and ask SLURM, and what the user does to a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.message import Message

from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.errors import HpctrainError
from hpctrain.files import describe_os_error
from hpctrain.launch.cancellation import cancel
from hpctrain.run.directory import RunDirectory
from hpctrain.status.state import RunState
from hpctrain.terminal import visible
from hpctrain.top.messages import QuestionScreen, TextScreen
from hpctrain.top.run_screen import OpenRun, RunScreen
from hpctrain.top.runs_screen import RunsScreen
from hpctrain.top.watch import Watch, WatchedRun

LOOK_EVERY_S = 2.0
"""Seconds between two looks at the files."""
LEAST_REST = 25
"""Looks are so far apart that they take at most one part in this of a core, however many runs there are."""
_HELP = """\
Up Down, j k      choose a run        PgUp PgDn Home End  in large steps
Enter             open it             Esc                 back
s                 sort by the next column       S         reverse
m                 show the next metric          M         the one before
/                 filter: words of a name, state, value, job, node or
                  reason; Enter keeps the filter, Esc removes it
c                 cancel the run      r   resume it       both ask first
q                 quit: the runs continue

In an open run, a shows the attempts or the log, and arrows scroll.

TREND has the newest values of the metric, oldest first; its lowest bar is
the lowest of them; ! is NaN or infinite. Files are read every 2 s. SLURM
is asked at most every 10 s, once for all runs. `python -m hpctrain status
--help` lists the states."""
_CSS = """
#summary { height: 1; text-style: bold; }
#runs { height: 1fr; }
#chosen { height: 3; }
#filter { height: 1; }
#about { height: auto; max-height: 6; }
#curve { height: 1fr; margin-top: 1; }
#below { height: 1fr; margin-top: 1; }
#log { width: 1fr; border-top: solid $primary; scrollbar-size-vertical: 1; }
#attempts { width: 1fr; border-top: solid $primary; scrollbar-size-vertical: 1; }
QuestionScreen, TextScreen { align: center middle; }
.box {
    width: 95%; max-width: 84; height: auto; max-height: 96%;
    padding: 0 1; border: round $primary; background: $surface;
}
.title { text-style: bold; margin-bottom: 1; }
.keys { margin-top: 1; text-style: bold; }
"""
RESUME_TIMEOUT_S = 300.0
"""Seconds that a submission may take: sbatch waits for a busy controller."""


class TopApp(App[None]):
    """Many runs, live.

    Args:
        watch: the runs.
    """

    CSS = _CSS
    TITLE = "hpctrain top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel_run", "Cancel"),
        Binding("r", "resume_run", "Resume"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    class Looked(Message):
        """The files have been read."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._runs_screen = RunsScreen(watch)
        self._opened: OpenRun | None = None
        self._ended = threading.Event()
        self._look_now = threading.Event()
        self._threads: list[threading.Thread] = []

    def on_mount(self) -> None:
        """Show the runs, and begin to read."""
        self.push_screen(self._runs_screen)
        # daemons, and not textual's workers: quitting doesn't wait for SLURM or a slow file system
        for name, target in (("looks", self._look_on), ("asks", self._ask_on)):
            thread = threading.Thread(target=target, name=f"hpctrain-top-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def on_unmount(self) -> None:
        """Let the threads end."""
        self._ended.set()
        self._look_now.set()

    def _look_on(self) -> None:
        while not self._ended.is_set():
            began = time.thread_time()
            self._watch.update()
            if (opened := self._opened) is not None:
                opened.update()
            self.post_message(self.Looked())
            self._look_now.wait(max(LOOK_EVERY_S, LEAST_REST * (time.thread_time() - began)))
            self._look_now.clear()

    def _ask_on(self) -> None:
        while not self._ended.wait(0.2):
            # a warning in this terminal would spoil the screen; that SLURM doesn't answer is shown there
            if self._watch.ask(lambda _: None):
                self._look_now.set()

    def on_top_app_looked(self) -> None:
        """Show what is new on the screen in sight."""
        if not self.screen_stack:  # the app is ending
            return
        if isinstance(self.screen, RunScreen):
            if self.screen.is_mounted:  # not before its parts are there; it shows the run itself then
                self.screen.show_run()
        elif self.screen is self._runs_screen:
            self._runs_screen.show_runs()

    def open_run(self, run: WatchedRun, metric: str) -> None:
        """Open a run."""
        self._opened = OpenRun(run)
        self._look_now.set()
        self.push_screen(RunScreen(self._opened, metric), lambda _: self._close_run())

    def _close_run(self) -> None:
        self._opened = None
        self._runs_screen.show_runs()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(TextScreen("hpctrain top: keys", _HELP))

    def action_cancel_run(self) -> None:
        """Cancel the chosen run, after a question."""
        run = self._chosen()
        if run is None:
            return
        title = f"cancel {run.name}"
        if run.status.state.may_change or run.status.state is RunState.UNKNOWN:
            text = f"Cancel {run.name}, which is {run.status.state}?\n\nIt saves if the time allows, and r resumes it."
            self._ask_and(text, run.directory, title, cancel_run)
        else:
            self.push_screen(TextScreen(title, f"nothing to cancel: the run is {run.status.described}"))

    def action_resume_run(self) -> None:
        """Resume the chosen run, after a question."""
        run = self._chosen()
        if run is None:
            return
        title = f"resume {run.name}"
        command = f"python -m hpctrain resume {run.directory.as_typed}"
        if read_plain_values(run.directory.config, ["cluster.kind"]).get("cluster.kind") != "slurm":
            text = f"It would train in this terminal. In another one, type:\n\n  {command}"
            self.push_screen(TextScreen(title, text))
            return
        text = f"Resume {run.name}, which is {run.status.state}?\n\n  {command}"
        self._ask_and(text, run.directory, title, resume_run)

    def _chosen(self) -> WatchedRun | None:
        return self._opened.run if self._opened is not None else self._runs_screen.chosen

    def _ask_and(self, text: str, directory: RunDirectory, title: str, act: Callable[[RunDirectory], str]) -> None:
        def begin(answer: bool | None) -> None:
            if answer:
                self.notify(visible(f"{title} ..."), markup=False)
                threading.Thread(target=work, name="hpctrain-top-acts", daemon=True).start()

        def work() -> None:
            result = _explained(lambda: act(directory))
            self._watch.find_soon()
            self._look_now.set()
            with contextlib.suppress(RuntimeError):  # the user has quit meanwhile
                self.call_from_thread(self.push_screen, TextScreen(title, result))

        self.push_screen(QuestionScreen(text), begin)


def cancel_run(directory: RunDirectory) -> str:
    """Cancel a run; describe what was done.

    Raises:
        HpctrainError: it isn't possible.
    """
    warnings: list[str] = []
    done = cancel(directory, warnings.append)
    return "\n".join([*warnings, done])


def resume_run(directory: RunDirectory) -> str:
    """Submit a run to continue it, as the user would; return what the command printed.

    Raises:
        TimeoutExpired: it took too long.
    """
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "resume", os.fspath(directory.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RESUME_TIMEOUT_S,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,  # Ctrl-C in this terminal isn't meant for it
    )
    ended = f"\n(exit code {done.returncode})" if done.returncode else ""
    return (done.stdout.strip() or "it printed nothing") + ended


def _explained(act: Callable[[], str]) -> str:
    try:
        return act()
    except HpctrainError as error:
        return str(error)
    except OSError as error:
        return describe_os_error(error)
    except subprocess.TimeoutExpired as error:
        return f"no answer within {error.timeout:g} s; see `python -m hpctrain status`"
