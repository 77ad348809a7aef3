from __future__ import annotations

import io
import json
import logging
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.terminal import GuardedStream, LogOutput, VisibleFormatter, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Zürich 数 2\n\tx", "Zürich 数 2\n\tx"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("over\rwritten\x08", r"over\rwritten\x08"),
        ("c1 \x9b31m", r"c1 \x9b31m"),
        ("abc\u202etxt.exe\u2066", r"abc\u202etxt.exe\u2066"),
        ("in\u200bvisible\ufeff\u2028", r"in\u200bvisible\ufeff\u2028"),
        ("a byte \udc9b", r"a byte \udc9b"),
        ("\x7f\x00", r"\x7f\x00"),
    ],
)
def test_what_could_control_a_terminal_is_spelled_out(text, shown):
    assert visible(text) == shown


def test_a_guarded_stream_is_otherwise_the_stream():
    stream = io.StringIO()
    guarded = GuardedStream(stream)
    print("a\x1b[1mb", 3, file=guarded, flush=True)
    guarded.writelines(["\x1b[2J", "c\n"])
    assert stream.getvalue() == "a\\x1b[1mb 3\n\\x1b[2Jc\n"
    assert not guarded.isatty()


def test_records_of_logging_are_visible_and_their_prefix_is_ours():
    record = logging.LogRecord("hpctrain", logging.INFO, "", 0, "lost %s", ("n1\x1b[2J",), None)
    assert (
        VisibleFormatter("rank 1: %(message)s", prefix="\r\x1b[K").format(record) == "\r\x1b[Krank 1: lost n1\\x1b[2J"
    )


def test_records_of_logging_fit_the_encoding_of_their_stream():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    record = logging.makeLogRecord({"msg": "präzision"})
    assert VisibleFormatter("%(message)s", stream=stream).format(record) == r"pr\xe4zision"


BARS = "\x1b[31mred\x1b[0m\r 10%|█ |\r\x1b[K 20%\x08\n"
LOG = f"{BARS}\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1bc\x9b1m\u202e\n".encode() + b"\xff\n"
SHOWN = BARS.encode() + rb"\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1bc\x9b1m\u202e" + b"\n\\xff\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_log_keeps_its_colours_and_bars_however_it_is_cut(size):
    stream = io.BytesIO()
    output = LogOutput(stream)
    for start in range(0, len(LOG), size):
        output.write(LOG[start : start + size])
    assert stream.getvalue() == SHOWN


@pytest.mark.parametrize(
    ("log", "is_reset"),
    [
        ("\x1b[31mred", True),
        ("\x1b[0;7m", True),
        ("\x1b[31mred\x1b[m", False),
        ("\x1b[1m\x1b[0;00m", False),
        ("plain", False),
    ],
)
def test_the_end_of_a_log_resets_colours_that_it_left(log, is_reset):
    stream = io.BytesIO()
    output = LogOutput(stream)
    output.write(log[:4].encode())
    output.write(log[4:].encode())
    output.reset()
    output.reset()
    assert stream.getvalue().decode() == log + "\x1b[0m" * is_reset


@pytest.fixture
def hostile(directory):
    """A run whose author wants to control the terminal of those who look at it."""
    directory.config.write_text("name: 'evil'\n")
    ledger = Ledger(directory)
    attempt = ledger.claim()
    nodes = ["n1\x1b]0;owned\x07"]
    ledger.start(attempt, job_id="7\x1b[2J", nodes=nodes, world_size=1, step=0)
    ledger.end(attempt, reason=Reason.FAILED, step=3, detail="rank 0: \x1b[2J\x9b\u202e no")
    directory.metrics.write_text('{"step": 3, "time": 1.0, "train/\\u001b[8mloss": 1.0}\n')
    directory.rank_log(0).write_bytes(LOG + b"\x1b[31m")
    return directory


def on_a_terminal(*words: str, folder: Path, until: str | None = None) -> str:
    """Type a command on a pseudo-terminal, and Ctrl-C once a text has arrived; return what arrives there."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "hpctrain", *words]
    with subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower, cwd=folder) as process:
        os.close(follower)
        arrived = b""
        try:
            while data := os.read(leader, 65536):
                arrived += data
                if until is not None and until.encode() in arrived:
                    process.send_signal(signal.SIGINT)
                    until = None
        except OSError:  # the process has ended
            pass
    os.close(leader)
    assert process.returncode is not None
    return arrived.decode()


RUN = "{run}"
MORE_WORDS = [
    ["status", "--json", RUN],
    ["inspect", "--json", RUN],
    ["logs", "--rank", "7", RUN],
    ["best", RUN],
    ["best", "--csv", RUN],
    ["best", "--metric", "\x1b[2J", RUN],
    ["compare", RUN, RUN],
    ["cancel", RUN],
    ["stacks", RUN],
    ["report", RUN, "-o", "page.html"],
    ["export", RUN, "-o", "x.pt"],
    ["sync", RUN],
    ["drill", RUN],
    ["fit-batch", "x=\x1b[2J"],
    ["doctor", "x\x1b[2J"],
    ["env", "\x1b[2J"],
    ["completion", "\x1b[2J"],
    ["run", "name=\x1b[2J", "--", "true"],
    ["top", "\x1b[2J"],
    ["resume", RUN],
    ["-m", "x=\x1b[2J"],
    ["name=\x1b[2J", "--cfg"],
]


@pytest.mark.nightly
@pytest.mark.parametrize("words", MORE_WORDS, ids=lambda words: words[0])
def test_each_command_prints_nothing_but_text(hostile: RunDirectory, words):
    name = "[red]x[x='\x1b[2J\u202e\udcff\n"
    run = hostile.path.rename(hostile.path.with_name(name))
    (run / "manifest.json").write_text(json.dumps({"command": name, "varied": {name: name}}))
    (run / "config.yaml").write_text(f"name: {json.dumps(name.replace(chr(0xDCFF), ''))}\ncluster: {{kind: local}}\n")
    JobRecords(RunDirectory.at(run)).add({"job_id": name, "time": 1.0, "log": f"/{name}.log"})
    text = on_a_terminal(*(str(run) if word == RUN else word for word in words), folder=run.parent)
    plain = text.replace("\r\n", "\n")
    assert visible(plain) == plain
    assert "Traceback" not in plain


@pytest.mark.parametrize(
    "words", [("status",), ("inspect",), ("resume", "x=\x1b[2J"), ("nonsense\x1b[2J",)], ids="-".join
)
def test_a_hostile_run_prints_nothing_but_text(hostile: RunDirectory, words):
    command, *more = words
    typed = (command,) if "\x1b" in command else (command, str(hostile.path), *more)
    text = on_a_terminal(*typed, folder=hostile.path.parent)
    assert text.strip()
    assert visible(text.replace("\r\n", "\n")) == text.replace("\r\n", "\n")


def test_a_hostile_log_controls_nothing(hostile: RunDirectory):
    text = on_a_terminal("logs", str(hostile.path), folder=hostile.path.parent)
    assert SHOWN.decode().splitlines()[-1] in text
    assert "\x1b[31mred" in text
    assert text.rstrip().endswith("\x1b[31m\x1b[0m")
    for sequence in ("\x1b]", "\x1b[2J", "\x1bc", "\u202e", "\x9b"):
        assert sequence not in text


@pytest.mark.nightly
def test_ctrl_c_on_a_log_that_is_followed_resets_its_colours(hostile: RunDirectory):
    attempt = Ledger(hostile).claim()
    Ledger(hostile).start(attempt, job_id=None, nodes=["n1"], world_size=1, step=0)
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    (hostile.attempt(attempt) / "owner.json").write_text(json.dumps(owner))
    text = on_a_terminal(
        "logs", "--follow", str(hostile.path), folder=hostile.path.parent, until=SHOWN.decode().splitlines()[-1]
    )
    assert "\x1b[31m" in text
    assert text.rstrip().endswith("\x1b[0m")
