"""The configuration of a program's run: its command, its name, its checks."""

import pytest

from hpctrain.config.checks import check, warnings_of
from hpctrain.config.command import refuse_missing_script
from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.config.program import command_of, default_name, placeholders, program_warnings
from hpctrain.config.resources import resources_of
from hpctrain.config.root import ProgramConfig, decides_the_weights, flat
from hpctrain.config.run import ProgramRun
from hpctrain.config.stored import load, load_run, to_yaml
from hpctrain.errors import ConfigError


def program(*command, **args):
    return ProgramConfig(args=args, run=ProgramRun(command=list(command)))


def composed(*overrides, command=("true",)):
    return ProgramComposer(list(command)).compose_run(list(overrides))


@pytest.mark.parametrize(
    ("value", "typed"),
    [(0.001, "0.001"), (3, "3"), ("a b", "a b"), (True, "true"), (None, "null"), ([1, 2.5, "x"], "1,2.5,x")],
)
def test_declared_values_replace_their_names(value, typed):
    assert command_of(program("train", "--x={args.x}!", x=value)) == ["train", f"--x={typed}!"]


def test_other_braces_stay():
    words = ["{x}", "{args.other}", "${HOME}", "{args}", "{{args.lr}}", "a{args.opt.lr}b", '{"json": {}}']
    assert command_of(program("train", *words, lr=1, opt={"lr": 2})) == [
        *("train", "{x}", "{args.other}", "${HOME}", "{args}", "{1}", "a2b", '{"json": {}}')
    ]


def test_placeholders_name_what_is_unused_and_what_is_unset():
    found = program("train", "{args.lr}", "print(f'{args.typo}')", "{args.typo}", lr=1, other=2)
    assert placeholders(found) == (["args.other"], ["args.typo"])
    warnings = program_warnings(found)
    assert warnings[0].startswith("args.other is not in the command: write {args.other}")
    assert warnings[1].startswith("{args.typo} stays as it is, because args.typo is not set")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py", "--x"], "train"),
        (["python", "-m", "lab.train", "x.py"], "x"),
        (["python", "-m", "lab.train"], "lab_train"),
        (["torchrun", "--nproc-per-node=2", "src/my train.py"], "my_train"),
        (["bash", "scripts/long.sh"], "long"),
        (["julia", "fit.jl"], "fit"),
        (["./binary"], "binary"),
        (["bash", "-c", "echo"], "bash"),
        (["..."], "program"),
    ],
)
def test_a_run_is_named_after_its_script(command, name):
    assert default_name(command) == name
    assert composed("cluster=slurm", command=command).name == name


def test_the_stored_configuration_keeps_the_command_as_it_was_typed(tmp_path):
    words = ["true", "${HOME}", "{args.lr}", "yes", "1e-3", "", "a\nb", "ü", "${oc.env:HOME}"]
    config = composed("args.lr=1e-3", "args.list=[1,a]", "args.deep.er=x", command=words)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_run(file) == config
    assert load_run(file, ["args.lr=2", "args.new=3"]).args == {
        "lr": 2,
        "list": [1, "a"],
        "deep": {"er": "x"},
        "new": 3,
    }
    with pytest.raises(ConfigError, match="is the run of a program"):
        load(file)


def test_the_command_and_its_values_are_the_runs_identity():
    keys = [key for key in flat(composed("args.lr=1", "cluster=slurm")) if decides_the_weights(key)]
    assert keys == ["args.lr", "run.command", "run.processes"]


def test_a_missing_command_is_refused_before_everything_else():
    with pytest.raises(ConfigError, match="there is no program to run"):
        check(ProgramConfig(nodes=2, run=ProgramRun(command=[])), {})


@pytest.mark.parametrize(
    ("overrides", "command", "line"),
    [
        ([], [], "there is no program to run; write python -m hpctrain run"),
        ([], [" "], "there is no program to run"),
        (["trainer.max_steps=3"], ["true"], "trainer.max_steps=3: belongs to hpctrain's own training"),
        (["+optimizer.lr=3"], ["true"], "add args.lr=3 and write {args.lr}"),
        (["nodes=2"], ["true"], "add cluster=slurm"),
        (["run.signal=KILL"], ["true"], "run.signal=KILL"),
        (["run.processes=gpu"], ["true"], "run.processes=gpu"),
        (["run.on_stop=0"], ["true"], "run.on_stop=0"),
        (["run.command=[ls]"], ["true"], "is set by what follows --"),
        (["run.signl=TERM"], ["true"], "did you mean run.signal"),
        (["args.x=[[1],2]"], ["true"], "write a list of single values"),
        (["args.x=1,2"], ["true"], "add -m to sweep over them"),
        ([], ["true", "--lr={args.lr}"], "run.command=--lr={args.lr}: args.lr is not set; add args.lr=VALUE before --"),
        (["args.width=1"], ["true", "{args.widht}"], "args.widht is not set; did you mean {args.width}?"),
        ([], ["no-such-program-here"], "no such program is in PATH here"),
        ([], ["./notes.txt"], "chmod +x ./notes.txt, or name its interpreter: -- julia ./notes.txt"),
        ([], ["./train.py"], "chmod +x ./train.py, or name its interpreter: -- python ./train.py"),
        ([], ["train.py", "3"], "is a file of this folder, which isn't in PATH; write python train.py"),
        ([], ["trian.py"], "is neither in PATH nor a file of this folder; did you mean python train.py?"),
        ([], ["nodes=2", "true", "a b"], "stand before --; write python -m hpctrain run nodes=2 -- true 'a b'"),
        (["cluster=slurm"], ["X=2", "true"], "write python -m hpctrain run cluster.env.X=2 -- true"),
        (["cluster.gpus_per_node=2"], ["true"], "this machine has no visible GPU; leave it out, with cluster.proc"),
        ([], ["true", "a\0b"], "contains a NUL character"),
        (["code.max_mb=-1"], ["true"], "code.max_mb=-1"),
        (["run.cwd=mine"], ["true"], "run.cwd=mine: is not known; choose one of own, shared"),
        (["run.cwd=own", "code.snapshot=none"], ["true"], "and code.snapshot=none makes none; leave out one of the"),
        (["name=a/b"], ["true"], "is not usable as a folder name"),
        (["resume.from_scratch=true"], ["true"], "has no effect on a program, which finds its own saves; leave it out"),
    ],
)
def test_a_wrong_use_is_one_line(overrides, command, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "notes.txt").write_text("#!/usr/bin/env -S julia -q\n")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError) as caught:
        composed(*overrides, command=command)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "train.py"]


def test_a_script_that_may_be_elsewhere_is_a_warning_and_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    found: list[str] = []
    for command in (
        ["torchrun", "--nproc-per-node=2", "trian.py"],
        ["python", "/nodes/only.py"],
        ["python", "-W", "x.py", "train.py"],
    ):
        refuse_missing_script(command, found.append)
    assert found == [
        "trian.py doesn't exist on this machine; did you mean train.py?",
        "/nodes/only.py doesn't exist on this machine; correct its path, or type this where it is",
        "x.py doesn't exist on this machine; correct its path, or type this where it is",
    ]
    found.clear()
    for command in (
        ["python", "train.py", "other.py"],
        ["python", "-m", "lab.train", "x.py"],
        ["bash", "-c", "python x.py"],
        ["bash", "-lc", "torchrun x.py"],
        ["python", "{args.script}.py"],
        ["bash", "run", "x.sh"],
        ["./binary", "x.py"],
        ["accelerate", "launch", "train.py"],
    ):
        refuse_missing_script(command, found.append)
    assert found == []


def test_keys_of_programs_are_refused_in_a_training():
    with pytest.raises(ConfigError, match="write python -m hpctrain run KEY=VALUE -- COMMAND"):
        Composer().compose(["run.signal=INT"])


def test_a_program_that_only_the_nodes_have_is_a_warning():
    config = composed("cluster=slurm", "cluster.partition=gpu2", command=["srun-only"])
    missing, gpus = warnings_of(config)
    assert missing.startswith("srun-only is not in PATH on this machine: it must be on the nodes")
    assert gpus.startswith("cluster.partition=gpu2 looks like a GPU partition, but the run requests no GPU")


def test_a_program_of_an_image_is_not_looked_for_on_this_machine():
    words = ["cluster=slurm", "cluster.container.image=/images/torch.sif", "cluster.container.engine=apptainer"]
    assert program_warnings(composed(*words, command=["image-only"])) == []


def test_one_process_per_node_has_the_cores_of_all_that_it_spawns():
    words = ["cluster=slurm", "nodes=2", "cluster.gpus_per_node=4", "cluster.cpus_per_process=3"]
    ranks, node = resources_of(composed(*words)), resources_of(composed(*words, "run.processes=node"))
    assert (ranks.world_size, ranks.cpus_per_process, ranks.spawned_per_node) == (8, 3, None)
    assert (node.world_size, node.cpus_per_process, node.spawned_per_node) == (2, 12, 4)
