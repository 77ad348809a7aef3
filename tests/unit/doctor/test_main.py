"""The options with which the doctor's job starts its shells."""

from __future__ import annotations

import pytest

from hpctrain.doctor.__main__ import PLUGIN, _without_tasks


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--mpi=pmi2", "--cpu-bind=cores"], ["--mpi=pmi2"]),
        (["-m", "block:cyclic", "-c", "4", "--network", "ib0"], ["--network", "ib0"]),
        (["--distribution", "block", "--ntasks-per-node=4", "--label"], ["--label"]),
        (["--gpus-per-task=1", "-n", "8"], []),
    ],
)
def test_options_that_place_ranks_are_left_out_with_their_values(options: list[str], kept: list[str]) -> None:
    assert _without_tasks(options) == kept


def test_only_a_plugin_that_cannot_load_is_tried_without_one() -> None:
    assert PLUGIN.search("Invalid MPI type 'pmix', --mpi=list for acceptable types")
    assert not PLUGIN.search("Job step creation temporarily disabled, retrying (Requested nodes are busy)")
