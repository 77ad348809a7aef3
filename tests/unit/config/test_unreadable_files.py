"""A file of the user's that can't be read is one line with its name and the line in it, and exit code 2."""

import pytest

from hpctrain.cli import main
from hpctrain.config.stored import load
from hpctrain.errors import ConfigError

FILES = {
    "a bracket": (b"defaults:\n  - slurm\npartition: [gpu\n", "line 4, is not valid YAML", "starts in line 3"),
    "a colon": (b"partition: a: b\n", "line 1, is not valid YAML", "mapping values"),
    "a key twice": (b"defaults:\n  - slurm\nqos: a\nqos: b\n", "line 4, is not valid YAML", "duplicate key qos"),
    "Latin-1": (b"defaults:\n  - slurm\n\naccount: caf\xe9\n", "line 4, is not UTF-8", "save the file as UTF-8"),
    "a control character": (b'defaults:\n  - slurm\naccount: "\x01"\n', "line 3, unacceptable character", "#x0001"),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conf" / "cluster" / "site.yaml"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    "words", [[], ["-m", "seed=1,2"], ["--cfg", "job"], ["--help"]], ids=["run", "sweep", "cfg", "help"]
)
@pytest.mark.parametrize(("held", "where", "what"), FILES.values(), ids=FILES)
def test_it_is_told_in_one_line(held, where, what, words, site, capfd):
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


@pytest.mark.parametrize(("held", "where", "what"), FILES.values(), ids=FILES)
def test_the_configuration_of_a_run_too(held, where, what, tmp_path):
    (tmp_path / "config.yaml").write_bytes(held)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "config.yaml")
    text = str(caught.value)
    assert "\n" not in text
    assert where in text
    assert what in text
    assert str(tmp_path / "config.yaml") in text
