"""Launchers such as torchrun in the command of a program: found in many forms, and refused as the ranks of a run."""

import shlex

import pytest

from hpctrain.config.command import RankLauncher
from hpctrain.config.compose import ProgramComposer
from hpctrain.config.program import program_warnings
from hpctrain.config.stored import to_yaml
from hpctrain.errors import ConfigError

LAUNCHERS = {
    "torchrun --nproc_per_node=2 x.py": "torchrun",
    "/opt/bin/torchrun x.py": "torchrun",
    "python -m torch.distributed.run x.py": "torchrun",
    "python3.11 -u -m torch.distributed.launch x.py": "torch.distributed.launch",
    "python -um torch.distributed.run x.py": "torchrun",
    "python -X dev -m accelerate.commands.launch x.py": "accelerate launch",
    "python /env/torch/distributed/run.py x.py": "torchrun",
    "python /env/bin/torchrun x.py": "torchrun",
    "accelerate launch x.py": "accelerate launch",
    "deepspeed x.py": "deepspeed",
    "python -m deepspeed.launcher.runner x.py": "deepspeed",
    "mpirun -np 2 ./x": "mpirun",
    "srun python x.py": "srun",
    "torchx run dist.ddp": "torchx run",
    "env A=1 -u B torchrun x.py": "torchrun",
    "timeout -k 5 60 nice -n 10 torchrun x.py": "torchrun",
    "nohup numactl --cpunodebind=0 -m 0 torchrun x.py": "torchrun",
    "uv run --with x torchrun x.py": "torchrun",
    "conda run -n e --no-capture-output torchrun x.py": "torchrun",
    "singularity exec --nv -B /a:/b i.sif torchrun x.py": "torchrun",
    "bash -c 'torchrun x.py'": "torchrun",
    "bash -euo pipefail -c 'cd x && exec torchrun x.py | tee log'": "torchrun",
    "sh -c 'A=1 B=\"x y\" python $(which torchrun) x.py'": "torchrun",
    "bash -c 'L=\"python -m torch.distributed.run\"; for i in 1 2; do $L x.py; done'": "torchrun",
    "bash -c 'if true; then torchrun x.py; fi'": "torchrun?",
    "bash -c 'test -f x || torchrun x.py'": "torchrun?",
    "bash train.sh": "torchrun",
    "./train.sh": "torchrun",
    "sh -c 'cd . ; ./train.sh'": "torchrun",
    "bash nested.sh": "torchrun",
    "./wrapper.sh torchrun x.py": "torchrun",
    "bash -c 'exec \"$@\"' _ torchrun x.py": "torchrun",
    "bash -c 'L=\"torchrun x.py\"; exec $L'": "torchrun",
    "sh -c 'eval \"torchrun x.py\"'": "torchrun",
    "lightning run model x.py": "lightning run",
}
OTHERS = [
    "python x.py torchrun",
    "python -c 'import torchrun' torchrun",
    "python -m lab.torchrun",
    "accelerate config",
    "torchrun --help",
    "nohup ./train --launcher deepspeed",
    "bash -c 'echo torchrun; # torchrun x.py'",
    "bash other.sh",
    "./wrapper.sh python x.py",
    "./binary",
    "bash missing.sh",
    "env",
    "",
]


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # not for this machine's own programs
    (tmp_path / "train.sh").write_text("#!/bin/bash -e\n# don't\nN=2\n\ntorchrun --nproc_per_node=$N \\\n  x.py\n")
    (tmp_path / "other.sh").write_text("cat > x.sh <<'EOF'\ntorchrun x.py\nEOF\nbash other.sh\npython x.py\n")
    (tmp_path / "nested.sh").write_text("bash train.sh\n")
    (tmp_path / "wrapper.sh").write_text('#!/bin/sh\nexport A=1\nexec "$@"\n')
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\ntorchrun x.py\n")
    for name in ("torchrun", "mpirun", "bash"):
        (tmp_path / name).touch(0o755)
    return tmp_path


@pytest.mark.usefixtures("scripts")
def test_launchers_are_found_in_commands():
    found = {line: RankLauncher.of(shlex.split(line)) for line in LAUNCHERS}
    names = {line: launcher and launcher.name + "?" * (not launcher.is_certain) for line, launcher in found.items()}
    assert names == LAUNCHERS
    assert {line: RankLauncher.of(shlex.split(line)) for line in OTHERS} == dict.fromkeys(OTHERS)


def composed(line, *overrides):
    return ProgramComposer(shlex.split(line)).compose_run(list(overrides))


@pytest.mark.parametrize(
    ("line", "overrides", "message"),
    [
        ("torchrun x.py", ["cluster.processes_per_node=2"], "torchrun starts the ranks itself, so its 2 copies would"),
        (
            "bash train.sh",
            ["cluster=slurm", "nodes=2", "cluster.gpus_per_node=4"],
            "its 8 copies (4 per node) would train separately, and overwrite each other's files; write run.processes=",
        ),
        ("torchrun --nproc_per_node=8 x.py", ["cluster=slurm", "nodes=2"], "its 2 copies (1 per node)"),
        ("{args.a} x.py", ["args.a=torchrun", "cluster.processes_per_node=2"], "torchrun starts"),
        (
            "mpirun ./x",
            ["cluster=slurm", "nodes=2"],
            "leave mpirun out, since hpctrain starts the ranks, or write run.in",
        ),
    ],
)
def test_a_launcher_in_each_rank_is_refused_with_what_to_type(scripts, line, overrides, message):
    with pytest.raises(ConfigError) as caught:
        composed(line, *overrides)
    assert str(caught.value).startswith("run.processes=ranks: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (scripts / "runs").exists()


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("torchrun x.py", []),
        ("torchrun x.py", ["run.processes=node", "cluster.processes_per_node=2"]),
        ("torchrun x.py", ["run.independent_ranks=true", "cluster.processes_per_node=2"]),
        ("torchrun --nnodes=2 --node_rank=0 x.py", ["cluster=slurm", "nodes=2"]),
        ("bash -c 'torchrun $OPTIONS x.py'", ["cluster=slurm", "nodes=2"]),
    ],
)
def test_launchers_that_run_alone_or_meet_are_not_refused(scripts, line, overrides):
    assert not any("separately" in warning for warning in program_warnings(composed(line, *overrides)))


@pytest.mark.usefixtures("scripts")
def test_a_launcher_that_may_not_run_is_a_warning():
    (warning,) = program_warnings(composed("bash -c 'if x; then torchrun x.py; fi'", "cluster.processes_per_node=2"))
    assert warning.startswith("torchrun starts the ranks itself, so its 2 copies might train separately")


def test_a_run_that_was_begun_with_it_continues_with_a_warning(scripts):
    config = composed("torchrun x.py", "cluster.processes_per_node=2", "run.independent_ranks=true", "run_dir=run")
    (scripts / "run").mkdir()
    (scripts / "run" / "config.yaml").write_text(to_yaml(config).replace("  independent_ranks: true\n", ""))
    (warning,) = program_warnings(composed("torchrun x.py", "cluster.processes_per_node=2", "run_dir=run"))
    assert "its 2 copies would train separately" in warning
    with pytest.raises(ConfigError, match="its 3 copies"):
        composed("torchrun x.py", "cluster.processes_per_node=3", "run_dir=run")
