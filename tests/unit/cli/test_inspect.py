from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.inspect import main
from hpctrain.errors import RunDirectoryError
from hpctrain.run.checkpoint_manifest import ALGORITHM, FORMAT_VERSION, MANIFEST, encode_manifest
from hpctrain.run.checkpoints import file_checksum
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.gone_checkpoints import record_saved
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.saves import record_save
from hpctrain.status.run_details import run_details
from hpctrain.status.run_status import read_status


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.at("runs/digits/now")
    directory.create(0o750)
    directory.config.touch()
    return directory


def save(directory, step, accuracy=None):
    path = directory.checkpoint(step)
    path.mkdir()
    (path / "weights.pt").write_bytes(b"w" * 3000)
    manifest = {
        "format_version": FORMAT_VERSION,
        "algorithm": ALGORITHM,
        "step": step,
        "samples_seen": step * 64,
        "world_size": 4,
        "config_digest": "c0ffee",
        "weights_digest": f"digest of {step}",
        "score": None if accuracy is None else {"name": "accuracy", "mode": "max", "value": accuracy},
        "time": 1_769_860_800.0,
        "files": {"weights.pt": {"bytes": 3000, "checksum": file_checksum(path / "weights.pt")}},
    }
    (path / MANIFEST).write_bytes(encode_manifest(manifest))
    return path


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)


def report(capsys, *arguments):
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_newest_intact_checkpoint_is_described(directory, capsys):
    paths = [save(directory, step) for step in (100, 120)]
    code, found = report(capsys, "digits")
    size = paths[0].joinpath(MANIFEST).stat().st_size + 3000
    assert code == 0
    assert found == {
        "run_dir": str(directory.path),
        "step": 120,
        "samples_seen": 7680,
        "world_size": 4,
        "weights_digest": "digest of 120",
        "config_digest": "c0ffee",
        "best": None,
        "best_warning": "",
        "checkpoints": [
            {"step": 100, "path": str(paths[0]), "intact": True, "bytes": size, "problem": "", "score": None},
            {"step": 120, "path": str(paths[1]), "intact": True, "bytes": size, "problem": "", "score": None},
        ],
        "gone_step": None,
        "set_aside": [],
        "unfinished": [],
    }


def test_one_flipped_bit_is_found_and_the_older_one_counts(directory, capsys):
    save(directory, 100)
    flip_a_bit(save(directory, 120) / "weights.pt")
    code, found = report(capsys, "digits")
    assert (code, found["step"], found["weights_digest"]) == (0, 100, "digest of 100")
    assert [entry["intact"] for entry in found["checkpoints"]] == [True, False]
    assert "weights.pt doesn't match its checksum" in found["checkpoints"][1]["problem"]


def test_a_quick_look_compares_sizes_alone(directory, capsys):
    flip_a_bit(save(directory, 120) / "weights.pt")
    assert report(capsys, "digits", "--quick")[1]["step"] == 120
    with (directory.checkpoint(120) / "weights.pt").open("ab") as file:
        file.write(b"more")
    assert report(capsys, "digits", "--quick")[1]["step"] is None


def test_no_checkpoint_is_no_error_and_none_intact_is_one(directory, capsys):
    code, found = report(capsys, "digits")
    assert (code, found["step"], found["checkpoints"]) == (0, None, [])
    (save(directory, 120) / MANIFEST).unlink()
    code, found = report(capsys, "digits")
    assert (code, found["step"], found["samples_seen"]) == (1, None, None)


def test_the_table_is_for_people(directory, capsys):
    save(directory, 100)
    flip_a_bit(save(directory, 120) / "weights.pt")
    (directory.checkpoints / ".tmp-step_00000140-0123abcd").mkdir()
    (directory.checkpoints / "damaged-step_00000130-0123abcd").mkdir()
    assert main(["runs/digits/now"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["run             runs/digits/now", "step            100", "samples_seen    6400"]
    assert lines[6] == "checkpoints"
    assert "step_00000120     3." in lines[7]
    assert "damaged: weights.pt doesn't match" in lines[7]
    assert lines[8].endswith("intact")
    assert lines[9] == "  damaged-step_00000130-0123abcd  damaged: skipped by a resume"
    assert lines[10] == "  .tmp-step_00000140-0123abcd  unfinished: still being written, or left by a crash"


def test_checkpoints_that_are_gone_are_reported(directory, capsys):
    ledger = Ledger(directory)
    ledger.start(ledger.claim(), job_id=None, nodes=[], world_size=4, step=0)
    record_saved(directory.attempt(1), 120)
    assert main(["digits"]) == 1
    assert "checkpoints     none\n  step 120, which the run saved, is gone\n" in capsys.readouterr().out
    ledger.end(1, reason=Reason.INTERRUPTED, step=120)
    advice = "hpctrain resume runs/digits/now resume.from_scratch=true"
    assert run_details(read_status(directory, {}), 0.0).endswith(advice)
    save(directory, 100)
    code, found = report(capsys, "digits")
    assert (code, found["step"], found["gone_step"]) == (0, 100, 120)
    status = read_status(directory, {})
    assert "checkpoint  step 100; the one of step 120, which the run saved, is gone\n" in run_details(status, 0.0)


def test_a_best_evaluation_without_a_checkpoint_is_named(directory, capsys):
    directory.config.write_text("checkpoint:\n  keep_best: 0\n")
    for step, accuracy in ((380, 0.9), (400, 0.8)):
        save(directory, step, accuracy)
    directory.attempt(1).mkdir()
    EvaluationRecord(step=400, means={}, best=Score("accuracy", "max", 0.95), best_step=180).write(directory.attempt(1))
    kept = "the best checkpoint on disk is that of step 380, with accuracy 0.9"
    why = "checkpoint.keep_best=0; set it to 1 to keep the best"
    warning = f"the best evaluation is accuracy 0.95 at step 180, whose checkpoint isn't on disk ({why}); {kept}"
    assert report(capsys, "digits")[1]["best_warning"] == warning
    assert main(["digits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"warning         {warning}"
    assert [line for line in lines if line.endswith("intact  accuracy 0.9, the best on disk")]
    assert read_status(directory, {}).best_warning == warning
    assert read_status(directory, {}, brief=True).best_warning == ""
    path = save(directory, 180, 0.95)
    assert report(capsys, "digits")[1]["best_warning"] == read_status(directory, {}).best_warning == ""
    for name in ("weights.pt", MANIFEST):
        (path / name).unlink()
        damaged = f"the best evaluation is accuracy 0.95 at step 180, whose checkpoint isn't intact; {kept}"
        assert report(capsys, "digits")[1]["best_warning"] == read_status(directory, {}).best_warning == damaged


def test_the_best_intact_one_is_marked(directory, capsys):
    for step, accuracy in ((100, 0.8), (120, 0.9), (140, 0.95), (160, None)):
        save(directory, step, accuracy)
    assert report(capsys, "digits")[1]["best"] == 140
    flip_a_bit(directory.checkpoint(140) / "weights.pt")
    code, found = report(capsys, "digits")
    assert (code, found["best"]) == (0, 120)
    assert found["checkpoints"][1]["score"] == {"name": "accuracy", "mode": "max", "value": 0.9}
    assert main(["digits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("intact  accuracy 0.9, the best")]
    assert [line for line in lines if line.endswith("intact  accuracy 0.8")]


def test_a_path_without_a_run_is_an_error(directory):
    with pytest.raises(RunDirectoryError, match="no such path"):
        main(["absent"])


def test_torch_is_not_needed(directory):
    save(directory, 100)
    program = """
import sys
from hpctrain.cli.inspect import main
code = main(["digits", "--json"])
assert not {"torch", "numpy", "omegaconf", "hydra"} & set(sys.modules)
sys.exit(code)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_of_a_program_the_saves_are_shown_that_it_reported(directory, capsys):
    directory.config.write_text("run: {command: [bash, long.sh]}\n")
    assert main(["digits"]) == 0
    assert "none reported: `python -m hpctrain run --help`" in capsys.readouterr().out
    (directory.checkpoints / "sharded").mkdir()
    (directory.checkpoints / "sharded" / "0.distcp").write_bytes(b"w" * 3000)
    for step, name in ((10, "last.pt"), (20, "sharded"), (30, "last.pt")):
        record_save(directory, 1, step, directory.checkpoints / name)
    lines = main(["digits"]), *capsys.readouterr().out.splitlines()
    assert lines[:3] == (0, "run             runs/digits/now", "step            20")
    assert [line.split()[1] for line in lines[4:]] == ["30", "20"]
    assert "gone" in lines[4]
    assert "2.9 KiB" in lines[5]
    assert lines[5].endswith("runs/digits/now/checkpoints/sharded")
    code, found = report(capsys, "digits")
    assert (code, found["step"], [save["exists"] for save in found["saves"]]) == (0, 20, [True, False])
    assert found["unreported"] == []
    for age in range(7):
        (path := directory.checkpoints / f"own_{age}.pt").write_bytes(b"12")
        os.utime(path, (1000 - age, 1000 - age))
    assert [Path(one["path"]).name for one in report(capsys, "digits")[1]["unreported"]][:2] == ["own_0.pt", "own_1.pt"]
    main(["digits"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[5] == "not reported"
    assert lines[6].endswith("runs/digits/now/checkpoints/own_0.pt")
    assert lines[11:] == ["  and 2 more"]
    shutil.rmtree(directory.checkpoints / "sharded")
    assert report(capsys, "digits")[0] == 1
