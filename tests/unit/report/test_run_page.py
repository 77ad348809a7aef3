from __future__ import annotations

import json

import pytest

from hpctrain.files import append_json_line
from hpctrain.report.run_page import run_page
from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.terminal import visible
from tests.support.logged_run import LoggedRun

SECTIONS = [
    "Curves",
    "Attempts",
    "Where the time went",
    "Speed",
    "Configuration",
    "Code",
    "Environment",
]
CONTROLS = "\x00\x1b[31m\u202e\udcff\x9b\u200b\u2028\r"
HOSTILE = f"</title></style><script>alert(1)</script><img src=x onerror='x'>\"'&{CONTROLS}"


def record(directory, event, attempt, step, time, **fields):
    record = {"event": event, "attempt": attempt, "step": step, "time": time, **fields}
    append_json_line(directory.attempts, record)


@pytest.fixture
def interrupted(directory):
    """Two attempts on two nodes: the first was preempted, and its last steps were repeated."""
    run = LoggedRun(directory)
    text = ""
    for step in range(1, 101):
        text += json.dumps({"step": step, "time": 1000.0 + step, "train/loss": 1 / step, "train/lr": 0.1}) + "\n"
        if step % 10 == 0:
            text += (
                json.dumps({"step": step, "time": 1000.5 + step, "eval/loss": 2 / step, "eval/accuracy": 0.5}) + "\n"
            )
            speed = {"throughput/samples_per_s": 500 + step, "throughput/waiting_for_data": 0.1}
            text += json.dumps({"step": step, "time": 1000.7 + step, **speed}) + "\n"
    directory.metrics.write_text(text)
    times = {"import_s": 2.0, "first_step_s": 1.0, "train_s": 40.0, "eval_s": 4.0, "save_s": 1.0}
    for attempt in (1, 2):
        Ledger(directory).claim()
        where = {"job_id": "7", "nodes": ["n1", "n2"], "world_size": 2, "launched": 1000.0 + 60 * attempt - 60}
        record(directory, "start", attempt, 40 * (attempt - 1), 1003.0 + 60 * (attempt - 1), **where)
        reason = Reason.PREEMPTED if attempt == 1 else Reason.COMPLETED
        end = {"reason": reason.value, "detail": "why it ended", **times}
        record(directory, "end", attempt, 50 * attempt, 1050.0 + 60 * (attempt - 1), **end)
        shares = {"data": 0.4, "forward": 0.6}
        found = Bottleneck(
            text="waiting for data", also=("the optimizer",), step=50, shares=shares,
            slowest_rank=1, slowest_host="n2", slowest_ratio=1.25,
        )  # fmt: skip
        found.write(directory.attempt(attempt))
    append_json_line(directory.jobs, {"job_id": "7", "time": 995.0})
    return run


def test_every_section_is_there(interrupted, read_page):
    page = read_page(run_page(interrupted.directory))
    assert page.headings == SECTIONS
    for text in (
        "completed",
        "effective training time ratio",
        "attempt 1 ended: preempted; attempt 2 resumed from step 40",
        "attempt 2 repeated 10 steps, from step 40 on",
        "2 ranks on n1 n2, job 7",
        "preempted after 50 s, steps 0 to 50, 10 lost: why it ended",
        "waiting for data",
        "the optimizer",
        "1 n2 1.25 50",
        "queued",
        "trainer.max_steps=100",
        "No copy of the code, and no git repository.",
    ):
        assert text in page.text, text
    # accuracy, loss, lr; throughput and waiting over time
    assert page.count("figure") == 5
    assert len(page.source) < 100_000


def test_the_slowest_rank_over_time_is_drawn_from_the_metrics(interrupted, read_page):
    slowest = ((5, 1, 1.5), (15, 1, 1.25), (25, 0, 1.125), (35, 1, 2.0))
    with interrupted.directory.metrics.open("a") as file:
        for step, rank, ratio in slowest:
            values = {"throughput/slowest_rank": rank, "throughput/slowest_ratio": ratio}
            file.write(json.dumps({"step": step, "time": 1000.0 + step, **values}) + "\n")
    page = read_page(run_page(interrupted.directory))
    # not connected with what another rank took in between
    for text in ("rank 1: up to 1.50 times the others", "rank 0: up to 1.12 times", "rank 1: up to 2.00 times"):
        assert text in page.text, text
    assert page.count("figure") == 6


def test_why_a_run_is_not_exact(interrupted, read_page):
    assert "not exact" not in run_page(interrupted.directory)
    for attempt, ranks, version in ((3, 2, "2.13.0"), (4, 1, "2.14.0")):
        Ledger(interrupted.directory).claim()
        fields = {"world_size": ranks, "torch": version, "resumed_world_size": None if ranks == 2 else 2}
        record(interrupted.directory, "start", attempt, 100, 1000.0 + 60 * attempt, **fields)
    text = read_page(run_page(interrupted.directory)).text
    assert "not exact from attempt 4 on: 1 rank resumed from a checkpoint of 2" in text
    assert "not exact torch 2.13.0 in attempt 3; torch 2.14.0 in attempt 4: the weights may differ" in text


def test_nothing_is_loaded_or_executed(interrupted):
    source = run_page(interrupted.directory)
    assert "http" not in source.replace('http-equiv="Content-Security-Policy"', "")
    assert "default-src 'none'" in source


def test_texts_are_escaped(directory, read_page):
    directory.config.write_text(
        json.dumps({"name": HOSTILE.encode(errors="replace").decode(), "task": {HOSTILE[:60]: 1}})
    )
    directory.manifest.write_text(
        json.dumps({"command": HOSTILE, "varied": {HOSTILE: HOSTILE}, "host": HOSTILE, "versions": {HOSTILE: HOSTILE}})
    )
    directory.metrics.write_text(json.dumps({"step": 1, "time": 1.0, f"eval/{HOSTILE}": 1.0, HOSTILE: 2.0}) + "\n")
    Ledger(directory).claim()
    record(directory, "start", 1, 0, 1.0, nodes=[HOSTILE], job_id=HOSTILE, world_size=1)
    record(directory, "end", 1, 1, 2.0, reason="failed", detail=HOSTILE)
    source = run_page(directory)
    page = read_page(source)  # fails at a script or an image
    assert "<script>" in page.text
    assert visible(source) == source
    source.encode()


def test_a_new_run(directory, read_page):
    LoggedRun(directory)
    page = read_page(run_page(directory))
    assert "The run has logged no metrics yet." in page.text
    assert "No attempt has begun." in page.text
    assert "No time has passed yet." in page.text


def test_a_run_whose_files_are_damaged(directory, read_page):
    for path in (directory.config, directory.manifest, directory.attempts, directory.jobs, directory.code_records):
        path.write_text('{"attempt": 1, "event": "start", "time": "never", "digest": 3')
    directory.attempts.write_text('{"attempt": 1, "event": "start", "time": "never"}\n')
    directory.metrics.write_text('{"step": 3, "time": 1e999, "a": 1e308}\n{"step": 4, "a": -1e308}\n{"step": 5, "a"')
    page = read_page(run_page(directory))
    assert "unreadable" in page.text
    assert "config.yaml can't be read." in page.text


@pytest.mark.parametrize(
    "values",
    [["nan"], ["nan", "inf", 1.0], [0.0], [1e-320, 1e308], [-1e308, 1e308], [3.0] * 5, [1.0, "nan", 1.0], [0.1, -1e-9]],
    ids=str,
)
def test_any_values_make_a_chart(directory, read_page, values):
    LoggedRun(directory)
    records = [
        {"step": step, "time": 1.0, "a": None, "nonfinite": {"a": value}}
        if isinstance(value, str)
        else {"step": step, "time": 1.0, "a": value}
        for step, value in enumerate(values)
    ]
    directory.metrics.write_text("".join(json.dumps(one) + "\n" for one in records))
    page = read_page(run_page(directory))
    assert page.count("figure") == 1
    assert not any("nan" in (found.get("d") or "") or "inf" in (found.get("d") or "") for _, found in page.elements)
    assert page.count("path", **{"class": "cross"}) == sum(isinstance(value, str) for value in values)


def test_a_program_without_reports(directory, read_page):
    directory.config.write_text(json.dumps({"name": "program", "run": {"command": ["python", "my.py"]}}))
    directory.manifest.write_text("{}")
    Ledger(directory).claim()
    record(directory, "start", 1, 0, 1.0, nodes=["n1"], world_size=1)
    record(directory, "end", 1, 0, 9.0, reason="completed", train_s=7.0)
    page = read_page(run_page(directory))
    assert "This program reported no metrics." in page.text
    assert "not reported" in page.text
    assert "effective training time ratio" not in page.text.lower()


def test_secrets_of_the_configuration_are_left_out(directory):
    config = {"name": "x", "cluster": {"env": {"TOKEN": "hunter2"}, "setup": ["export KEY=hunter2"]}}
    directory.config.write_text(json.dumps(config))
    command = "python -m hpctrain cluster.env.TOKEN=hunter2 trainer.max_steps=2"
    directory.manifest.write_text(json.dumps({"command": command}))
    source = run_page(directory)
    assert "hunter2" not in source
    assert "trainer.max_steps=2" in source


def test_many_metrics_and_attempts_are_bounded(directory, read_page):
    LoggedRun(directory)
    names = {f"train/layer_{number}": 1.0 for number in range(300)}
    directory.metrics.write_text(
        "".join(json.dumps({"step": n, "time": 1e4 + n, **names}) + "\n" for n in range(1, 30))
    )
    for attempt in range(1, 501):
        record(directory, "start", attempt, 0, 10.0 * attempt, nodes=["n1"], world_size=1)
        record(directory, "end", attempt, 0, 10.0 * attempt + 5, reason="node_failure")
    page = read_page(run_page(directory))
    assert "260 metrics not drawn" in page.text
    assert "300 attempts before these aren't shown." in page.text
    assert len(page.source) < 500_000
