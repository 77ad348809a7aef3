from __future__ import annotations

import re

import pytest

from hpctrain import errors
from hpctrain.errors import ClusterEnvironmentError, ConfigError, ExitCode, HpctrainError

CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HpctrainError)]
DRAWN = re.findall(r"^([│├└─ ]*)(\w+Error)", errors.__doc__ or "", re.MULTILINE)
"""Every line of the tree: its branches, and the class at their end."""


def test_the_tree_shows_every_class_below_its_base():
    assert [name for _, name in DRAWN] == [one.__name__ for one in CLASSES]
    above = {}
    for branches, name in DRAWN:
        depth = len(branches) // 4
        above[depth] = name
        if depth:
            assert getattr(errors, name).__base__.__name__ == above[depth - 1]


@pytest.mark.parametrize("kind", CLASSES)
def test_the_tree_names_the_exit_codes_of_mistakes(kind):
    (line,) = re.findall(rf"─ {kind.__name__} .*", errors.__doc__) if kind is not HpctrainError else [""]
    assert kind.exit_code is (ExitCode.BAD_CONFIGURATION if "exit code 2" in line else ExitCode.FAILED)


def test_a_key_is_shown_as_it_is_typed_on_one_line():
    error = ConfigError("trainer.max_steps", None, "the run would\n never end", "set it")
    assert str(error) == "trainer.max_steps=null: the run would never end; set it"
    assert (error.key, error.value) == ("trainer.max_steps", None)


def test_variables_are_shown_with_their_values():
    assert str(ClusterEnvironmentError("expected one", {"RANK": "1", "SIZE": "x"})) == (
        "expected one (found RANK=1, SIZE=x)"
    )
    assert str(ClusterEnvironmentError("expected one", {})) == "expected one"


def test_where_the_fault_lies_is_part_of_an_error():
    assert errors.RendezvousError("rank 1 did not come", waited=True).waited
    assert not errors.RendezvousError("no rank zero").waited
    assert errors.CheckpointDamagedError("see rank zero", elsewhere=True).elsewhere
    assert not errors.CheckpointError("the disk is full").elsewhere
