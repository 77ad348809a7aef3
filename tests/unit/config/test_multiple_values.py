from __future__ import annotations

import pytest

from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def slurm_of(composer: Composer, *overrides: str) -> Slurm:
    cluster = composer.compose(["cluster=slurm", *overrides]).cluster
    assert isinstance(cluster, Slurm)
    return cluster


@pytest.mark.parametrize("key", ["partition", "exclude", "constraint", "reservation", "qos", "network_interface"])
def test_a_list_of_slurms_or_gloos_keeps_its_comma(composer: Composer, key: str) -> None:
    assert getattr(slurm_of(composer, f"cluster.{key}=a,b"), key) == "a,b"


def test_sbatch_options_keep_their_commas_and_zeros(composer: Composer) -> None:
    asked = slurm_of(composer, "cluster.sbatch.mail-type=END,FAIL", "cluster.sbatch.nodelist=007,08")
    assert asked.sbatch == {"mail-type": "END,FAIL", "nodelist": "007,08"}


def test_a_quoted_comma_is_part_of_any_text(composer: Composer) -> None:
    assert composer.compose(["cluster.env.A='a,b'"]).cluster.env == {"A": "a,b"}


@pytest.mark.parametrize("value", ["choice(low,high)", "'a',b", "range(1,3)"])
def test_what_is_not_a_plain_list_has_several_values(composer: Composer, value: str) -> None:
    with pytest.raises(ConfigError, match="has several values; add -m"):
        slurm_of(composer, f"cluster.partition={value}")


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        ("a", ["a"]),
        ("runs/a/2026-01-31_12-00-00,b", ["runs/a/2026-01-31_12-00-00", "b"]),
        ("[a,b]", ["a", "b"]),
        ("007,1e5", ["007", "1e5"]),
        ("'a b','c=d'", ["a b", "c=d"]),
        ("sweep/lr=0.1", ["sweep/lr=0.1"]),
        ("[]", []),
        ("null", []),
        ("", []),
    ],
)
def test_names_of_runs_need_no_brackets(composer: Composer, typed: str, runs: list[str]) -> None:
    assert composer.compose([f"after={typed}"]).after == runs
    assert ProgramComposer(["true"]).compose_run([f"after={typed}"]).after == runs


def test_names_of_runs_are_one_value_of_a_sweep(composer: Composer) -> None:
    (override,) = composer.parse(["after=a,b"])
    assert not override.is_sweep_override()
