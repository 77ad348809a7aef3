"""Where the user's variables for sbatch count, and where the keys do."""

from __future__ import annotations

import pytest

from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.errors import ConfigError

SET = {
    "SBATCH_ACCOUNT": "def-me",
    "SBATCH_PARTITION": " gpu ",
    "SBATCH_QOS": " ",
    "SBATCH_RESERVATION": "course",
    "SBATCH_TIMELIMIT": "3",
}


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SET.items():
        monkeypatch.setenv(name, value)


def keys(*words: str) -> tuple[str | None, ...]:
    training, program = Composer().compose_run([*words]), ProgramComposer(["true"]).compose_run([*words])
    assert isinstance(training.cluster, Slurm)
    assert training.cluster == program.cluster
    cluster = training.cluster
    return cluster.account, cluster.partition, cluster.qos, cluster.reservation


def test_they_stand_for_keys_that_are_null() -> None:
    assert keys("cluster=slurm") == ("def-me", "gpu", None, "course")
    cluster = Composer().compose(["cluster=slurm"]).cluster
    assert isinstance(cluster, Slurm)
    assert cluster.time_limit_min == 60


def test_a_key_wins() -> None:
    assert keys("cluster=slurm", "cluster.account=other", "cluster.qos=long") == ("other", "gpu", "long", "course")


def test_another_cluster_has_no_such_keys() -> None:
    assert not hasattr(Composer().compose([]).cluster, "account")


def test_an_impossible_one_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "a\n#SBATCH --qos=b")
    with pytest.raises(ConfigError, match=r"^cluster\.account="):
        Composer().compose(["cluster=slurm"])
