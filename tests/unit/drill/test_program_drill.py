from __future__ import annotations

import pytest

from hpctrain.config.compose import ProgramComposer
from hpctrain.drill.program_drill import changed_code, overrides_of
from hpctrain.run.code import CodeSnapshot, describe_file, list_of, record_code, write_files
from hpctrain.run.directory import RunDirectory


def test_the_logs_of_a_drill_are_not_code():
    composer = ProgramComposer(["python", "train.py"])
    typed = ["code.exclude=[data,'it\\'s']", "cluster.wait=true"]
    config = composer.compose_run(overrides_of(typed))
    assert not config.cluster.wait
    config = composer.compose_run(overrides_of(typed, config))
    assert config.code.exclude == ["data", "it's", "straight.log", "interrupted.log"]


@pytest.mark.parametrize(
    ("typed", "cwd"), [([], "own"), (["run.cwd=shared"], "shared"), (["code.snapshot=none"], None)], ids=str
)
def test_the_runs_of_a_drill_do_not_share_what_they_write(typed, cwd):
    composer = ProgramComposer(["true"])
    config = composer.compose_run(overrides_of(typed, composer.compose_run(overrides_of(typed))))
    assert config.run.cwd == cwd


@pytest.mark.parametrize("typed", [["cluster=slurm", "cluster.gpus_per_node=2"], []], ids=["asked for", "uncounted"])
def test_a_drill_with_gpus_makes_cublas_and_nccl_deterministic(monkeypatch, typed):
    """Also where there may be some."""
    monkeypatch.setattr("hpctrain.config.resources.visible_gpus", lambda environ, build=None: None)
    composer = ProgramComposer(["python", "train.py"])
    config = composer.compose_run(overrides_of(typed, composer.compose_run(overrides_of(typed))))
    expected = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    assert config.cluster.env == expected


def copied(run, **files):
    folder = run.code / run.path.name
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    write_files(list_of(folder), [describe_file(folder / name, name) for name in files])
    code = CodeSnapshot(run=run, digest=folder.name, folder=folder, root=run.path, place=".")
    record_code(run, code, 1.0)


def test_code_that_was_edited_during_the_drill_is_named(tmp_path):
    straight, interrupted = runs = [RunDirectory.at(tmp_path / name) for name in ("straight", "interrupted")]
    for run in runs:
        run.create(0o750)
    assert changed_code(*runs) == []  # no copies
    copied(straight, train="a", log="1", same="x")
    copied(interrupted, train="b", new="2", same="x")
    assert changed_code(*runs) == ["the code was changed between the two launches: log, new, train"]
    assert changed_code(straight, straight) == []
