"""A service is told what identifies a run, and nothing that may be secret."""

from __future__ import annotations

import json
import shlex

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.sync.sent_run import Rows, describe, describe_state

MANIFEST = {
    "command": "python -m hpctrain -m optimizer.lr=0.1,0.2",
    "varied": {"optimizer.lr": "0.1"},
    "time": 1000.5,
    "user": "me",
    "host": "login1",
    "git": {"commit": "abc", "diff": "+ secret", "diff_left_out": False},
}
CONFIG = {
    "name": "made",
    "optimizer": {"lr": 0.1},
    "cluster": {"env": {"TOKEN": "secret"}, "setup": ["export TOKEN=secret"]},
    "logger": {"every_steps": 5, "wandb": {"project": "p"}},
}


@pytest.fixture
def made_run(tmp_path):
    """Makes a run directory with this manifest and configuration."""

    def make(name, manifest=MANIFEST):
        directory = RunDirectory.at(tmp_path / "sweep" / name)
        directory.create(0o750)
        directory.manifest.write_text(json.dumps(manifest))
        directory.config.write_text(json.dumps(CONFIG))
        return directory

    return make


def test_a_run_of_a_sweep(made_run):
    found = describe(made_run("0"), "abc")
    assert found.digest == "abc"
    assert (found.name, found.group) == ("sweep/0 optimizer.lr=0.1", "sweep")
    assert found.config == {"name": "made", "optimizer.lr": 0.1, "logger.every_steps": 5}
    assert found.origin == {"command": MANIFEST["command"], "host": "login1", "user": "me", "git_commit": "abc"}
    assert (found.started, found.key("wandb", "project"), found.key("mlflow", "experiment")) == (1000.5, "p", None)
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    "word",
    [
        "cluster.env.TOKEN=secret",
        "+cluster.env.TOKEN='a secret'",
        "cluster.env={TOKEN:secret}",
        "cluster.setup=['export A=secret']",
        "cluster={env:{TOKEN:secret}}",
        "--with=cluster.env.TOKEN=secret",
        "hpctrain.compose({'cluster.env.TOKEN': 'secret'})",
        "logger.mlflow.tracking_uri=http://secret@host",
    ],
)
def test_the_command_has_no_values_that_stay_here(made_run, word):
    command = shlex.join(["python", "-m", "hpctrain", "name=a b", word, "seed=3"])
    varied = {"cluster.env.TOKEN": "secret", "seed": "3"}
    found = describe(made_run("0", MANIFEST | {"command": command, "varied": varied}), "abc")
    sent = found.origin["command"]
    assert sent.startswith("python -m hpctrain 'name=a b' ")
    assert sent.endswith("*** seed=3")
    assert "secret" not in repr(found)


def test_a_run_whose_files_cannot_be_read_is_described_all_the_same(made_run):
    directory = made_run("0")
    directory.manifest.write_text("{")
    directory.config.write_text("[")
    found = describe(directory, "abc")
    assert (found.config, found.origin, found.started) == ({}, {}, 0.0)
    assert describe_state(directory, "unknown").summary == {"hpctrain/attempts": 0, "hpctrain/state": "unknown"}


def test_rows_are_read_as_they_come_and_void_ones_are_forgotten(made_run):
    directory = made_run("0")
    rows = Rows(directory, after=1)
    rows.read()
    assert rows.before(None) == []
    with directory.metrics.open("a") as file:
        file.write('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\nnonsense\n{"step": 4,')
    rows.read()
    assert [(row.step, row.values) for row in rows.before(None)] == [(2, {"a": 2}), (3, {"a": 3})]
    with directory.metrics.open("a") as file:
        file.write(' "a": null, "nonfinite": {"a": "nan"}}\n')
    rows.read()
    assert [row.step for row in rows.before(4)] == [2, 3]
    assert repr(rows.before(None)[-1].values) == "{'a': nan}"
    rows.mark_sent(rows.before(3))
    replaced = directory.metrics.with_name("new")
    replaced.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "b": 4}\n')
    replaced.replace(directory.metrics)
    rows.read()
    assert [(row.step, row.values) for row in rows.before(None)] == [(3, {"b": 4})]


def test_a_replacement_that_got_the_inode_of_the_file_before_it_is_seen(made_run):
    directory = made_run("0")
    rows = Rows(directory, after=-1)
    directory.metrics.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n')
    rows.read()
    rows.mark_sent(rows.before(2))
    # in place: as a file system that gives the number of a removed file to the next one
    directory.metrics.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "b": 4}\n{"step": 4, "b": 5}\n')
    rows.read()
    assert [(row.step, row.values) for row in rows.before(None)] == [(2, {"a": 2}), (3, {"b": 4}), (4, {"b": 5})]
    directory.metrics.write_text('{"step": 2')
    rows.read()
    rows.read()
    assert rows.before(None) == []


def test_taking_rows_costs_as_much_as_there_are_rows(made_run):
    class Counted(dict):
        num_seen = 0

        def __iter__(self):
            for key in super().__iter__():
                self.num_seen += 1
                yield key

    directory = made_run("0")
    directory.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(600)))
    rows = Rows(directory, after=-1)
    rows.read()
    read = rows._rows = Counted(rows._rows)
    found = rows.before(None)
    for first in range(0, 600, 10):
        rows.mark_sent(found[first : first + 10])
    assert rows.before(None) == []
    assert read.num_seen <= 600


@pytest.mark.parametrize(("after", "steps"), [(-1, [0, 1, 2, 3]), (1, [2, 3]), (2, [3])])
def test_rows_continue_after_what_another_sender_has_sent_or_not(made_run, after, steps):
    directory = made_run("0")
    directory.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(4)))
    rows = Rows(directory, after=-1)
    rows.read()
    rows.mark_sent(rows.before(2))
    rows.continue_after(after)
    rows.read()
    assert [row.step for row in rows.before(None)] == steps
