"""The application without a terminal, over run directories."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from textual.widgets import Input, Static

from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords, cancelled_at
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.status.state import RunState
from hpctrain.terminal import visible
from hpctrain.top.app import TopApp
from hpctrain.top.messages import QuestionScreen, TextScreen, fitted, plain
from hpctrain.top.run_screen import RunScreen
from hpctrain.top.runs_screen import RunTable
from hpctrain.top.watch import Watch

PATIENCE_S = 20.0


@pytest.fixture
def make_run(tmp_path):
    def make(name, *, kind="local", pid=None, reason=None, values=(0.5, 0.25), detail=""):
        directory = RunDirectory.at(tmp_path / "runs" / name)
        directory.create(0o750)
        config = f"name: digits\ncluster:\n  kind: {kind}\ntrainer:\n  max_steps: 40\n"
        directory.config.write_text(config)
        ledger = Ledger(directory)
        claim = directory.attempt(ledger.claim())
        if pid is not None:
            (claim / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": pid}))
        ledger.start(1, job_id=None, nodes=["n1"], world_size=1, step=0)
        sink = JsonLinesSink(directory.metrics, 0)
        for step, value in enumerate(values, start=1):
            sink.log(10 * step, {"train/loss": value, "eval/loss": 2 * value})
        sink.close()
        directory.rank_log(0).write_text(f"the log of {name}\n\x1b[31mred\x1b[0m\rbar 1\rbar 2\n\x1b]0;title\x07\n")
        if reason is not None:
            ledger.end(1, reason=reason, step=10 * len(values), detail=detail)
        return directory

    return make


@contextlib.asynccontextmanager
async def opened(folder, size=(120, 30)):
    app = TopApp(Watch(folder, ask=lambda job_ids, warn: None))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app._watch.has_looked)
        await pilot.pause()
        yield app, pilot


async def until(pilot, is_true):
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        await pilot.pause(0.02)


def lines(app):
    """The screen as text."""
    strips = app.screen._compositor.render_strips(app.size)
    return ["".join(segment.text for segment in strip) for strip in strips]


def names(app):
    return [run.name for run in app.screen.query_one(RunTable).rows]


def text_of(app):
    return "\n".join(str(static.render()) for static in app.screen.query(Static))


def test_it_shows_sorts_filters_and_opens(make_run, tmp_path):
    make_run("a", reason=Reason.COMPLETED, values=(0.5, 0.4, 0.3, 0.2))
    make_run("b", reason=Reason.FAILED, detail="rank 3 on n2 failed")
    make_run("c", pid=os.getpid())

    async def use():
        async with opened(tmp_path / "runs", (200, 40)) as (app, pilot):
            shown = "\n".join(lines(app))
            for part in ("3 runs", "completed", "running", "100%", "rank 3 on n2 failed", "train/loss", "Quit"):
                assert part in shown
            await pilot.press("s")
            assert names(app) == ["a", "b", "c"]
            await pilot.press("S")
            assert names(app) == ["c", "b", "a"]
            await pilot.press("slash", *"fail")
            assert names(app) == ["b"]
            await pilot.press("enter")
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, RunScreen) and "the log of b" in "\n".join(lines(app)))
            shown = "\n".join(lines(app))
            for part in ("rank 3 on n2 failed", "train/loss 0.25", "bar 2", "\\x1b]0;title", "│", "step 10"):
                assert part in shown
            assert "bar 1" not in shown
            await pilot.press("m")
            assert "eval/loss 0.5" in text_of(app)
            await pilot.press("a")
            await pilot.pause()
            assert "failed after" in "\n".join(lines(app))
            await pilot.press("escape")
            assert names(app) == ["b"]
            await pilot.press("escape")
            assert len(names(app)) == 3
            assert not app.screen.query_one(Input).display
            await pilot.press("question_mark")
            assert isinstance(app.screen, TextScreen)
            assert "both ask first" in text_of(app)
            await pilot.press("escape")
            await pilot.press("q")

    asyncio.run(use())


HOSTILE = "[red]x[/][x='][@click=app.quit]y\x1b]0;owned\x07\x1b[2J\u202e\u009b1m"


def foreign_markup(app):
    """What a screen shows that isn't text: control characters, and actions and styles of markup."""
    for widget in app.screen.walk_children():
        assert widget.border_title is None or visible(widget.border_title) == widget.border_title
    strips = app.screen._compositor.render_strips(app.size)
    for segment in (segment for strip in strips for segment in strip):
        if visible(segment.text) != segment.text:
            yield segment.text
        if segment.style is not None and ("@click" in segment.style.meta or segment.style.link):
            yield segment.style


def test_the_text_of_a_run_is_neither_markup_nor_control_sequences(make_run, tmp_path):
    name = HOSTILE.replace("/", "")
    run = make_run(name, kind="slurm", reason=Reason.FAILED, detail=f"{HOSTILE}\n{HOSTILE}\n" + "x" * 3000)
    config = run.config.read_text().replace("name: digits", f"name: {json.dumps(HOSTILE)}")
    run.config.write_text(config)
    record = {"command": "x", "varied": {HOSTILE: HOSTILE, "\udcff": "\ud800"}}
    run.manifest.write_text(json.dumps(record, indent=2))
    Ledger(run).claim()
    Ledger(run).start(2, job_id=HOSTILE, nodes=[HOSTILE, "n" * 500], world_size=1, step=0)
    Ledger(run).end(2, reason=Reason.FAILED, step=30, detail=f"{HOSTILE}\n{HOSTILE}\n" + "x" * 3000)
    run.metrics.write_text(json.dumps({"step": 3, "time": 1.0, HOSTILE: 1.0, "y" * 10**5: 2.0, "\ud800": 3.0}) + "\n")
    run.rank_log(0).unlink()
    log = run.path / "[x=']\x1b[2J\udcff.log"
    log.write_bytes(HOSTILE.encode() + b"\xff\n" + b"\0" * 1000 + b"\n")
    JobRecords(run).add({"job_id": HOSTILE, "time": 1.0, "log": str(log)})
    seen = []

    async def use():
        async with opened(tmp_path / "runs", (200, 40)) as (app, pilot):

            async def look(*keys):
                await pilot.press(*keys)
                await pilot.pause()
                assert list(foreign_markup(app)) == []
                seen.append("\n".join(lines(app)))

            await look()
            for keys in (["m"], ["m"], ["slash", "[", "enter"], ["c"], ["escape", "r"]):
                await look(*keys)
            app.pop_screen()
            app.push_screen(TextScreen(HOSTILE, HOSTILE))
            app.notify(plain(HOSTILE).plain, markup=False)
            await until(pilot, lambda: isinstance(app.screen, TextScreen))
            await look()
            await look("escape", "enter")
            await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.opened.log)
            await look("m")
            await look("a")
            app.screen.opened.log.append("")
            log.unlink()
            log.mkdir()
            app.screen.opened.update()
            app.on_top_app_looked()
            await look()

    asyncio.run(use())
    assert all("[red]" in shown for shown in seen), [shown for shown in seen if "[red]" not in shown]


def test_many_attempts_scroll_and_a_log_that_turns_unreadable_says_so(make_run, tmp_path):
    run = make_run("a", reason=Reason.PREEMPTED)
    ledger = Ledger(run)
    for number in range(2, 40):
        ledger.claim()
        ledger.start(number, job_id="7", nodes=["n1"], world_size=2, step=number)
        ledger.end(number, reason=Reason.PREEMPTED, step=number + 1)

    async def use():
        async with opened(tmp_path / "runs", (80, 24)) as (app, pilot):
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, RunScreen) and "the log of a" in "\n".join(lines(app)))
            await pilot.press("a")
            await until(pilot, lambda: "2 on n1" in "\n".join(lines(app)))
            await pilot.press("end")
            await until(pilot, lambda: "1 on n1" in "\n".join(lines(app)))
            await pilot.press("a")
            opened_run = app.screen.opened
            opened_run._log_file.read = lambda: (_ for _ in ()).throw(OSError(5, "Input/output error"))
            opened_run.update()
            app.screen.show_run()
            await until(pilot, lambda: "the log can't be read" in "\n".join(lines(app)))

    asyncio.run(use())


def test_a_program_whose_attempt_has_not_begun_shows_neither_attempts_nor_steps(tmp_path):
    directory = RunDirectory.at(tmp_path / "runs" / "a")
    directory.create(0o750)
    directory.config.write_text("name: a\nrun:\n  command: [x]\n")

    async def use():
        async with opened(tmp_path / "runs", (200, 24)) as (app, pilot):
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, RunScreen) and "no attempt has begun" in text_of(app))
            assert "it reports no steps" in text_of(app)

    asyncio.run(use())


@pytest.mark.parametrize("size", [(80, 24), pytest.param((200, 60), marks=pytest.mark.nightly), (30, 8)])
def test_every_line_fits(make_run, tmp_path, size):
    make_run("a-name-that-is-long/2026-01-31_12-00-00", reason=Reason.FAILED, detail="why " * 50)
    make_run("日本語" * 8, pid=os.getpid())

    async def use():
        async with opened(tmp_path / "runs", size) as (app, pilot):
            assert {len(line) <= size[0] for line in lines(app)} == {True}
            table = lines(app)
            assert any("running" in line for line in table)
            assert any("failed" in line for line in table)
            for key in ("enter", "a", "escape", "question_mark", "escape", "down", "pagedown", "end", "home"):
                await pilot.press(key)

    asyncio.run(use())


def test_an_empty_folder_and_a_run_that_appears(make_run, tmp_path):
    async def use():
        async with opened(tmp_path / "runs") as (app, pilot):
            assert "yet; they appear here" in text_of(app)
            await pilot.press("enter", "c", "r", "s", "m", "down")
            make_run("a")
            app._watch.find_soon()
            app._look_now.set()
            await until(pilot, lambda: names(app) == ["a"])

    asyncio.run(use())


def test_a_run_that_can_not_be_read(make_run, tmp_path):
    directory = make_run("a")
    directory.attempts.write_text('{"event": "end", "attempt": 1, "time": "late"}\n')

    async def use():
        async with opened(tmp_path / "runs") as (app, pilot):
            assert app.screen.chosen.status.state is RunState.UNREADABLE
            assert "expected time to be epoch seconds" in text_of(app)
            await pilot.press("enter")
            await until(pilot, lambda: "the log of a" in "\n".join(lines(app)))

    asyncio.run(use())


def test_cancelling_asks_first_and_stops_a_local_run(make_run, tmp_path):
    program = "import time; print('here', flush=True); time.sleep(60)  # hpctrain"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        directory = make_run("a", pid=process.pid)

        async def use():
            async with opened(tmp_path / "runs") as (app, pilot):
                assert app.screen.chosen.status.state is RunState.RUNNING
                await pilot.press("c")
                assert isinstance(app.screen, QuestionScreen)
                assert "Cancel a, which is running?" in text_of(app)
                await pilot.press("n")
                assert process.poll() is None
                await pilot.press("c", "y")
                await until(pilot, lambda: isinstance(app.screen, TextScreen))
                assert f"asked process {process.pid} to stop" in text_of(app)
                await pilot.press("escape")
                process.wait(10)
                await until(pilot, lambda: app.screen.chosen.status.state is not RunState.RUNNING)
                await pilot.press("c")
                assert "nothing to cancel: the run is cancelled" in text_of(app)

        asyncio.run(use())
    assert process.returncode == -signal.SIGINT
    assert cancelled_at(JobRecords(directory).read()) is not None


def test_a_run_of_this_machine_is_not_trained_in_the_application(make_run, tmp_path):
    directory = make_run("a", reason=Reason.INTERRUPTED)

    async def use():
        async with opened(tmp_path / "runs") as (app, pilot):
            await pilot.press("r")
            assert isinstance(app.screen, TextScreen)
            assert f"python -m hpctrain resume {directory.path}" in text_of(app)

    asyncio.run(use())


def test_resuming_a_run_of_a_cluster_asks_and_shows_what_the_command_prints(make_run, tmp_path):
    make_run("a", kind="slurm", reason=Reason.INTERRUPTED)  # its configuration is too short to be launched

    async def use():
        async with opened(tmp_path / "runs") as (app, pilot):
            await pilot.press("r")
            assert isinstance(app.screen, QuestionScreen)
            await pilot.press("y")
            # a screen is there a moment before its text
            await until(pilot, lambda: isinstance(app.screen, TextScreen) and "exit code 2" in text_of(app))
            assert "hpctrain: error:" in text_of(app)

    asyncio.run(use())


def test_texts_fill_their_cells():
    assert fitted("abc", 5) == "abc  "
    assert fitted("abc", 5, right=True) == "  abc"
    assert fitted("abcdef", 4) == "abc…"
    assert fitted("abcdef", 4, keep_end=True) == "…def"
    assert fitted("日本語", 4) == "日 …"
    assert fitted("a\x1bb", 8) == "a\\x1bb  "
