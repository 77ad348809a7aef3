from __future__ import annotations

import pytest
import yaml

from hpctrain.cli import best
from hpctrain.files import write_json
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.report.run_page import run_page
from hpctrain.report.sweep_page import sweep_page
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.ledger import Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.search.journal import Journal, JournalEvent, SearchDecision
from hpctrain.status.runs import find_runs


def make_run(home, number, *, lr=0.1, layer="gelu", seed=0, best=0.5, reason=Reason.COMPLETED):
    directory = RunDirectory.at(home / str(number))
    directory.create(0o750)
    config = {
        "name": "x",
        "task": {"_target_": "mine.Task"},
        "optimizer": {"lr": lr},
        "model": {"layer": layer},
        "seed": seed,
    }
    directory.config.write_text(yaml.safe_dump(config))
    varied = {"optimizer.lr": str(lr), "model.layer": layer, "seed": str(seed)}
    write_json(directory.manifest, {"command": "python -m hpctrain -m", "varied": varied, "time": 1.0})
    ledger = Ledger(directory, clock=lambda: 15.0)
    attempt = ledger.claim()
    ledger.start(attempt, StartFacts(launched=10.0), job_id=None, nodes=["n1"], world_size=1, step=0)
    if best is not None:
        sink = JsonLinesSink(directory.metrics, 0, clock=lambda: 20.0)
        for step in (10, 20):
            sink.log(step, {"eval/accuracy": best * step / 20})
        sink.close()
        score = Score("accuracy", "max", best)
        EvaluationRecord(step=20, means={"eval/accuracy": best}, best=score, best_step=20).write(
            directory.attempt(attempt)
        )
    if reason is not None:
        write_json(directory.attempt(attempt) / "times.json", {"first_step_s": 1.0, "train_s": 3.0})
        ledger.end(attempt, reason=reason, step=20)
    return directory


@pytest.fixture
def home(tmp_path):
    return tmp_path / "sweep"


def test_a_sweep(home, read_page):
    for number, lr in enumerate((1e-4, 1e-3, 1e-2, 1e-1)):
        for seed in (1, 2):
            layer = "relu" if number % 2 else "gelu<b>"
            make_run(home, 2 * number + seed - 1, lr=lr, layer=layer, seed=seed, best=0.5 + number / 10 + seed / 100)
    make_run(home, 8, lr=1.0, best=0.2, reason=Reason.INTERRUPTED)
    make_run(home, 9, lr=1e-5, best=None, reason=Reason.FAILED)
    page = read_page(sweep_page(home, find_runs(home)))
    assert page.headings == [
        "Results",
        "Keys together",
        "The metric over each key",
        "Learning curves",
        "Where the time of all runs went",
        "Configuration of the best run",
        "Code of the best run",
        "Environment of the best run",
    ]
    assert "0.815 \u00b1 0.0071 over 2 seeds, with optimizer.lr=0.1 model.layer=relu" in page.text
    assert "optimizer.lr on a log scale" in page.text
    assert "interrupted" in page.text
    # 4 rows over seeds and 2 others, below the head
    assert page.count("tr") == 1 + 6
    # nine learning curves, nine lines through the axes, and a sample for each kind of line in the legend
    assert sum(found.get("class", "").startswith("line ") for _, found in page.elements) == 9 + 9 + 5
    assert sum(found.get("class") == "line pale" for _, found in page.elements) == 3
    # nine dots for each of three keys
    assert sum(found.get("class", "").startswith("dots ") for _, found in page.elements) == 3 * 9


def test_a_sweep_without_results(home, read_page):
    for number in range(3):
        make_run(home, number, lr=10.0**-number, best=None, reason=None)
    page = read_page(sweep_page(home, find_runs(home)))
    assert "No metric ranks these runs" in page.text
    assert page.headings[0] == "Results"
    assert page.count("figure") == 0


def test_a_search(home, read_page):
    make_run(home, 0, lr=0.1)
    make_run(home, 1, lr=0.2)
    space = {"optimizer.lr": "interval(0.1, 1)"}
    write_json(
        home / "sweep.json", {"kind": "random", "seed": 3, "num_runs": 9, "space": space, "fixed": ["a=hunter2"]}
    )
    page = read_page(sweep_page(home, find_runs(home)))
    assert "kind random" in page.text
    assert "interval(0.1, 1)" in page.text
    assert "hunter2" not in page.text


def test_values_that_may_be_secret_are_hidden(home, read_page):
    for number, token in enumerate(("hunter1", "hunter2")):
        run = make_run(home, number, best=0.5 + number / 10)
        config = yaml.safe_load(run.config.read_text()) | {"cluster": {"kind": "slurm", "env": {"TOKEN": token}}}
        run.config.write_text(yaml.safe_dump(config))
        write_json(run.manifest, {"command": "c", "varied": {"cluster.env.TOKEN": token}, "time": 1.0})
    write_json(home / "sweep.json", {"kind": "grid", "space": {"+cluster.env.TOKEN": "hunter1,hunter2"}})
    for page in (sweep_page(home, find_runs(home)), run_page(RunDirectory.at(home / "0"))):
        assert "hunter" not in page
        assert "cluster.env.TOKEN" in read_page(page).text
        assert "***" in page


def test_a_sweep_of_several_states_says_how_many_runs_completed(home, read_page):
    make_run(home, 0)
    make_run(home, 1, lr=0.2, reason=Reason.FAILED)
    assert "1 of 2 runs completed" in read_page(sweep_page(home, find_runs(home))).text


def test_damaged_runs(home, read_page):
    make_run(home, 0, lr=0.1)
    broken = make_run(home, 1, lr=0.2)
    broken.attempts.write_text('{"attempt": 1, "event": "start", "time": "never"}\n')
    torn = make_run(home, 2, lr=0.3)
    torn.config.write_text("{")
    torn.metrics.write_text('{"step')
    (home / "sweep.json").write_text("[")
    page = read_page(sweep_page(home, find_runs(home)))
    assert "unreadable" in page.text


def test_the_budget_of_each_rung(home, read_page):
    for number in range(4):
        make_run(home, number, lr=10.0**-number, best=0.1 * number)
    journal = Journal(RunDirectory.at(home))
    journal.folder.mkdir()
    for run in range(4):
        journal.publish(SearchDecision(event=JournalEvent.BEGIN, run=run, task="1"))
        journal.publish(SearchDecision(event=JournalEvent.END, run=run, step=10, value=0.1 * run, reason="paused"))
    journal.publish(SearchDecision(event=JournalEvent.BEGIN, run=3, rung=1, task="1"))
    journal.publish(SearchDecision(event=JournalEvent.END, run=3, rung=1, step=30, reason="failed"))
    page = read_page(sweep_page(home, find_runs(home)))
    assert "Budget by rung" in page.headings
    assert "rung 0 4 runs, 4 with a value 40 steps, 66.7%" in page.text
    assert "rung 1 1 run, 0 with a value 20 steps, 33.3%" in page.text


def test_what_is_left_out_is_named(home, read_page, monkeypatch, capsys):
    monkeypatch.setattr("hpctrain.report.sweep_page.MOST_ROWS", 2)
    monkeypatch.setattr("hpctrain.report.sweep_charts.MOST_CHARTS", 1)
    for number in range(4):
        make_run(home, number, lr=10.0**-number, layer=f"l{number % 2}", best=0.1 + 0.1 * number)
    page = read_page(sweep_page(home, find_runs(home)))
    assert f"2 rows after these not shown; all of them: python -m hpctrain best {home} --csv" in page.text
    assert "1 key not drawn, see the results: model.layer" in page.text
    assert best.main([str(home), "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4


def test_the_best_dots_are_numbered(home, read_page):
    for number in range(4):
        make_run(home, number, lr=10.0**-number, best=0.1 + 0.1 * number)
    page = read_page(sweep_page(home, find_runs(home)))
    assert "A number is the rank of the dot beside it." in page.text
