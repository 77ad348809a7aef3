"""A mistake of the user's is one line: it names the file or the word, and what to write instead."""

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError

FILES = {
    "a misspelt key of slurm's": (
        "cluster",
        "defaults: [slurm, _self_]\npartiton: gpu\n",
        "contains cluster.partiton, which is not a known key; did you mean cluster.partition?",
    ),
    "one in a group of the group": (
        "cluster",
        "defaults: [slurm, _self_]\nrequeue:\n  max_failurs: 3\n",
        "contains cluster.requeue.max_failurs, which is not a known key; did you mean cluster.requeue.max_failures?",
    ),
    "a misspelt key of a model that isn't the default one": (
        "model",
        "defaults: [gpt, _self_]\nnum_haeds: 3\n",
        "contains model.num_haeds, which is not a known key; did you mean model.num_heads?",
    ),
    "a misspelt key of an experiment": (
        "experiment",
        "# @package _global_\ntrainer:\n  max_step: 3\n",
        "contains trainer.max_step, which is not a known key; did you mean trainer.max_steps?",
    ),
    "slurm's key without slurm": (
        "cluster",
        "partition: gpu\n",
        "contains cluster.partition, which exists only with cluster=slurm; start the file with ",
    ),
    "a text for a number": (
        "cluster",
        "defaults: [slurm, _self_]\ntime_limit_min: abc\n",
        "contains cluster.time_limit_min, which must be a whole number; ",
    ),
    "a text for a list": (
        "cluster",
        "defaults: [slurm, _self_]\nsetup: foo\n",
        "contains cluster.setup, which must be a list; write it in brackets",
    ),
    "a list of the file itself": (
        "cluster",
        "- a\n- b\n",
        "the file contains no keys; write lines of the form KEY: VALUE",
    ),
    "a key that named optimizers don't share": (
        "optimizer",
        "defaults: [named, _self_]\ngroups: [{match: a}]\n",
        "contains optimizer.groups, which named optimizers don't share; set it in optimizer.named.NAME.groups",
    ),
    "a group that isn't there": (
        "experiment",
        "# @package _global_\ndefaults:\n  - override /tsk: digits\n",
        "contains tsk, which is not a known group or key; did you mean task?",
    ),
}
UNREADABLE = {
    "a bracket": (b"defaults:\n  - slurm\npartition: [gpu\n", "line 4, is not valid YAML", "starts in line 3"),
    "a colon": (b"partition: a: b\n", "line 1, is not valid YAML", "mapping values"),
    "a key twice": (b"defaults:\n  - slurm\nqos: a\nqos: b\n", "line 4, is not valid YAML", "duplicate key qos"),
    "Latin-1": (b"defaults:\n  - slurm\n\naccount: caf\xe9\n", "line 4, is not UTF-8", "save the file as UTF-8"),
    "a control character": (b'defaults:\n  - slurm\naccount: "\x01"\n', "line 3, unacceptable character", "#x0001"),
}


@pytest.mark.parametrize(("group", "held", "told"), FILES.values(), ids=FILES)
def test_the_file_is_named_and_the_key_suggested(group, held, told, tmp_path):
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text(held)
    with pytest.raises(ConfigError) as caught:
        Composer(str(tmp_path)).compose([f"{group}=mine"])
    assert str(caught.value).startswith(f"{group}=mine: {told}")


def test_a_mistake_in_a_default_is_told_though_the_defaults_cannot_be_composed(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "default.yaml").write_text("max_step: 3\n")
    with pytest.raises(
        ConfigError, match=r"^trainer=default: contains trainer\.max_step, .* mean trainer\.max_steps\?$"
    ):
        Composer(str(tmp_path)).compose([])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["cluster=slurm", "cluster.partiton=gpu"],
            "cluster.partiton=gpu: is not a known key; did you mean cluster.part",
        ),
        (["cluster.partiton=gpu"], "cluster.partiton=gpu: is not a known key; did you mean cluster.partition?"),
        (
            ["model=gpt", "task=text", "model.num_haeds=3"],
            "model.num_haeds=3: is not a known key; did you mean model.num_h",
        ),
        (["task=text", "task.held_ot=0.1"], "task.held_ot=0.1: is not a known key; did you mean task.held_out?"),
        (
            ["task=text", "task.context=3"],
            "task.context=3: is not a known key; did you mean task.context_length? A new key of your own needs a plus",
        ),
        (["~optimizer.eps"], "~optimizer.eps=: can't be removed; set a value instead: optimizer.eps=VALUE"),
        (["~optimizer.eps=1e-8"], "~optimizer.eps=1e-8: can't be removed; set a value instead: "),
        (["~trainer.max_steps"], "~trainer.max_steps=: can't be removed; set a value instead: trainer.max_steps=VALUE"),
        (["~cluster.env"], "~cluster.env=: can't be removed; set a value instead: cluster.env=VALUE"),
        (["~trainer.max_step"], "trainer.max_step=: is not a known key; did you mean trainer.max_steps?"),
        (["cluster=slurm", "cluster.setup=foo"], "cluster.setup=foo: must be a list; write it in brackets: cluster."),
    ],
)
def test_the_command_line_is_told_by_what_it_chooses(words, told):
    with pytest.raises(ConfigError) as caught:
        Composer().compose(words)
    assert str(caught.value).startswith(told)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conf" / "cluster" / "site.yaml"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    "words", [[], ["-m", "seed=1,2"], ["--cfg", "job"], ["--help"]], ids=["run", "sweep", "cfg", "help"]
)
@pytest.mark.parametrize(("held", "where", "what"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_is_one_line(held, where, what, words, site, capfd):
    site.write_bytes(held)
    assert main(["--config-dir", "conf", *words, "cluster=site", "cluster.dry_run=true"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith(f"hpctrain: error: cluster=site: {site}, {where}")
    assert what in err


@pytest.mark.parametrize(
    ("held", "what"), [("3\n", "loaded object type: int"), ("defaults: slurm\n", "defaults must be a list")]
)
@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2"]], ids=["run", "sweep"])
def test_yaml_that_is_no_configuration(held, what, words, site, capfd):
    site.write_text(held)
    assert main(["--config-dir", "conf", *words, "cluster=site"]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1, err
    assert "cluster=site" in err
    assert what in err
