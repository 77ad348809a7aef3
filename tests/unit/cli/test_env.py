import json
import socket

import pytest

from hpctrain.cli import env

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "CUDA_VISIBLE_DEVICES": "0,3",
}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The process's environment, empty until a test fills it."""
    variables: dict[str, str] = {}
    monkeypatch.setattr("os.environ", variables)
    return variables


def test_json(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    environ.update(STEP, HOME="/root")
    assert env.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["hostname"], report["is_rank"], report["gpus_visible"]) == (socket.gethostname(), True, 2)
    assert report["variables"] == STEP
    assert report["environment"]["rank"] == 1
    assert report["environment"]["nodes"] == ["n1", "n2"]
    assert report["environment"]["source"] == "slurm"


def test_the_table_has_every_field_and_every_variable(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    environ.update(STEP)
    assert env.main([]) == 0
    derived, _, variables = capsys.readouterr().out.partition("\nfrom\n")
    rows = dict(line.split(maxsplit=1) for line in derived.splitlines()[1:])
    assert (rows["rank"], rows["world_size"], rows["master_addr"], rows["nodes"]) == ("1", "2", "n1", "n1 n2")
    assert rows["array_task"] == "-"
    assert [line.strip() for line in variables.splitlines()] == [f"{name}={STEP[name]}" for name in sorted(STEP)]


def test_what_can_not_be_parsed_is_marked(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    environ.update(STEP, SLURM_RESTART_COUNT="twice")
    assert env.main([]) == 0
    assert "SLURM_RESTART_COUNT=twice  (ignored: it can't be parsed)\n" in capsys.readouterr().out
    env.main(["--json"])
    assert json.loads(capsys.readouterr().out)["unparsable"] == {"SLURM_RESTART_COUNT": "twice"}


def test_a_plain_process(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert env.main([]) == 0
    printed = capsys.readouterr().out
    assert "single" in printed
    assert "CUDA_VISIBLE_DEVICES is not set" in printed
    assert printed.endswith("(none)\n")


@pytest.mark.parametrize(("devices", "count"), [("", 0), ("-1", 0), ("3", 1), ("0,1,-1,2", 2), ("GPU-ab,MIG-cd", 2)])
def test_gpus_are_counted_as_cuda_does(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], devices: str, count: int
) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = devices
    env.main(["--json"])
    assert json.loads(capsys.readouterr().out)["gpus_visible"] == count


def test_variables_for_gpus_of_amd(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"ROCR_VISIBLE_DEVICES": "GPU-1f,GPU-2a", "HIP_VISIBLE_DEVICES": "1", "OTHER": "0"}
    environ.update(listed)
    env.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["gpus_visible"] == 1
    del listed["OTHER"]
    assert report["variables"] == listed


def test_a_contradiction_is_exit_code_2(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    environ.update(STEP, WORLD_SIZE="8")
    assert env.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "WORLD_SIZE=8" in printed.err
    assert "SLURM_STEP_NUM_TASKS=2" in printed.err
    assert env.main(["--json"]) == 2
    assert json.loads(capsys.readouterr().out)["variables"] == {"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        env.main(["--help"])
    assert caught.value.code == 0
    assert "python -m hpctrain env" in capsys.readouterr().out
