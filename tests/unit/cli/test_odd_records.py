"""Whatever lies in a run's directory, it is one line of `status`; other commands refuse it in one line."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.launch.prepare import prepare
from hpctrain.run.checkpoint_manifest import MANIFEST, encode_manifest
from tests.unit.written_records import LINES, OBJECTS, ODD, WHOLE_FILES, write_records


def fields():
    """Each field of each record: the file, the number of the record, the name."""
    lines = [(name, place, key) for name, all_of in LINES.items() for place, one in enumerate(all_of) for key in one]
    objects = [(name, 0, key) for name, one in OBJECTS.items() for key in one]
    configured = [("config.yaml", 0, key) for key in ("name", "trainer", "cluster", "nodes", "optimizer")]
    return [*lines, *objects, *configured]


@pytest.fixture(scope="module")
def config():
    return Composer().compose(["name=odd"])


@pytest.fixture
def runs(tmp_path, monkeypatch, config, slurm):
    """A run with every record, and another; a function to begin again."""
    monkeypatch.chdir(tmp_path)
    slurm.queue(j12={"State": "COMPLETED"})
    for name in ("good", "odd"):
        config.run_dir = f"runs/{name}"
        prepare(config, [])
    odd = tmp_path / "runs" / "odd"
    write_records(odd)
    shutil.copytree(odd, tmp_path / "kept", symlinks=True)

    def again():
        shutil.rmtree(odd)
        shutil.copytree(tmp_path / "kept", odd, symlinks=True)
        return odd

    return again


def type_in(*words):
    """The exit code of a command, its output and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def substitute(odd, target, value):
    name, place, key = target
    path = odd / name
    if name == "config.yaml":
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), key: value}))
    elif name in LINES:
        records = copy.deepcopy(LINES[name])
        records[place][key] = value
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif name.endswith(f"20/{MANIFEST}"):
        record = {**OBJECTS[name], key: value}
        record.pop("checksum")
        path.write_bytes(encode_manifest(record))
    else:
        path.write_text(json.dumps({**OBJECTS[name], key: value}))


def assert_commands_cope():
    code, out, err = type_in("status")
    lines = out.splitlines()
    assert (code, len(lines), err) == (0, 3, ""), out + err
    assert any(line.startswith("good ") and " prepared " in line for line in lines), out
    code, out, err = type_in("status", "odd", "--json")
    record = json.loads(out, parse_constant=pytest.fail)
    assert (code, err) == (0, "")
    for words in (["status", "odd"], ["inspect", "odd"], ["cancel", "odd"], ["resume", "odd", "cluster.dry_run=true"]):
        code, out, err = type_in(*words)
        assert code in (0, 1, 2), (words, err)
        # `inspect` also ends with 1 after a table with damaged checkpoints
        assert err.count("\n") == (code == 2 or (code == 1 and not (words[0] == "inspect" and out))), (words, code, err)
    if record["state"] == "unreadable":
        code, out, _ = type_in("cancel", "odd")
        assert code == 1 or "nothing to cancel" in out  # it doesn't read checkpoints
        assert type_in("resume", "odd")[0] in (1, 2)


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # many examples at night
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(fields()), st.sampled_from(ODD))
@example(("attempts.jsonl", 0, "nodes"), None)
@example(("attempts.jsonl", 0, "world_size"), "text")
@example(("attempts.jsonl", 1, "time"), float("nan"))
@example(("attempts.jsonl", 1, "detail"), "a\0b")
@example(("jobs.jsonl", 0, "time"), 10**400)
@example(("jobs.jsonl", 0, "log"), "a\0b")
@example(("attempts/0002/owner.json", 0, "host"), "two\nlines")
def test_an_odd_value_in_any_field(runs, target, value):
    substitute(runs(), target, value)
    assert_commands_cope()


GATE = [  # test_mutants.py has the others, at random
    ("cut", "attempts.jsonl"),
    ("deep", "config.yaml"),
    ("a pipe", "metrics.jsonl"),
    ("a loop", "config.yaml"),
]
NAMES = [*LINES, *OBJECTS, "attempts", "checkpoints", "attempts/0001", "config.yaml"]
OTHERS = [(kind, name) for kind in WHOLE_FILES for name in NAMES if (kind, name) not in GATE]


@pytest.mark.parametrize(
    ("kind", "name"), [*GATE, *(pytest.param(*other, marks=pytest.mark.nightly) for other in OTHERS)]
)
def test_something_else_in_place_of_a_file(runs, kind, name):
    path: Path = runs() / name
    if not path.is_dir() and kind == "cut":
        WHOLE_FILES[kind](path)
    elif kind != "cut":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        WHOLE_FILES[kind](path)
    if name == "config.yaml" and kind in ("a folder", "a pipe", "a device", "a loop", "a link to nothing"):
        assert [line.split()[0] for line in type_in("status")[1].splitlines()] == ["RUN", "good"]
    else:
        assert_commands_cope()


def test_what_is_wrong_is_named(runs):
    substitute(runs(), ("attempts.jsonl", 0, "world_size"), "text")
    code, out, _ = type_in("status")
    (line,) = [line for line in out.splitlines() if line.startswith("odd ")]
    expected = "expected world_size to be a whole number from 0 to 1048576, found 'text'"
    why = f"{Path.cwd()}/runs/odd/attempts.jsonl: {expected}"
    assert (code, line.split()[1]) == (0, "unreadable")
    assert why in line
    assert "next" not in type_in("status", "odd")[1]
    assert type_in("cancel", "odd") == (1, "", f"hpctrain: error: runs/odd: {why}; correct the file, or move it away\n")
    assert type_in("resume", "odd") == (2, "", f"hpctrain: error: {why}; correct the file, or move it away\n")
