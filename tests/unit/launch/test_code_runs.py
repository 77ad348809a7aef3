from __future__ import annotations

from hpctrain.launch.code_runs import Runs
from hpctrain.run.directory import RunDirectory


def test_of_a_sweep_the_records_and_the_logs_are_left_out_and_what_users_put_there_is_not(tmp_path):
    for sweep in ("lr", "notes"):
        for file in ("logs/batch_10_0.log", "logs/batch_11.log", "logs/mine.log", "code.jsonl", "own.py"):
            (tmp_path / sweep / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / sweep / file).touch()
    (tmp_path / "lr" / "sweep.json").touch()
    run = RunDirectory.at(tmp_path / "lr" / "0")
    run.create(0o750)
    run.config.touch()
    home = tmp_path / "other"
    home.mkdir()
    runs = Runs(tmp_path, home)
    made = {
        path
        for file in tmp_path.rglob("*")
        if file.is_file() and runs.contain(path := str(file.relative_to(tmp_path))) and not path.startswith("lr/0/")
    }
    assert made == {"lr/sweep.json", "lr/code.jsonl", "lr/logs/batch_10_0.log", "lr/logs/batch_11.log"}


def test_the_mark_of_a_launch_is_left_out_and_a_file_of_the_user_with_its_name_is_not(tmp_path):
    for folder, content in (("killed", '{"command": []}'), ("package", '{"angle": 45}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "launching.json").write_text(content)
    runs = Runs(tmp_path, tmp_path / "R")
    assert runs.contain("killed/launching.json")
    assert not runs.contain("package/launching.json")
