from __future__ import annotations

import pytest

from hpctrain.launch.sbatch import DEFAULT_LARGEST, largest_array, task_arrays


def sizes(groups, max_parallel, largest):
    arrays = task_arrays([range(size) for size in groups], max_parallel, largest)
    return [(len(array.tasks), array.max_parallel) for array in arrays]


@pytest.mark.parametrize(
    ("groups", "max_parallel", "largest", "expected"),
    [
        ([1001], None, 1001, [(1001, 1001)]),
        ([1002], None, 1001, [(501, 501), (501, 501)]),
        ([2500], 10, 1001, [(833, 3), (833, 3), (834, 4)]),
        ([300, 1, 1], 4, 1001, [(300, 2), (1, 1), (1, 1)]),
        ([2, 2], 3, 1001, [(2, 2), (2, 1)]),
        ([2, 2], 9, 1001, [(2, 2), (2, 2)]),
        ([4], 1, 2, [(2, 1), (2, 1)]),
        ([3], None, 1, [(1, 1)] * 3),
    ],
)
def test_arrays_are_few_and_share_what_may_run_at_the_same_time(groups, max_parallel, largest, expected):
    assert sizes(groups, max_parallel, largest) == expected


def test_each_task_is_in_one_array():
    group = [3, 5, 8, 13, 21, 34, 55]
    assert [list(array.tasks) for array in task_arrays([group], None, 3)] == [[3, 5], [8, 13], [21, 34, 55]]


def test_slurm_is_asked_once(slurm):
    slurm.config(MaxArraySize=40)
    assert [largest_array(9), largest_array(9)] == [40, 40]
    assert slurm.num_config_questions == 1


def test_one_task_asks_nothing(slurm):
    assert largest_array(1) == 1
    assert slurm.num_config_questions == 0


def test_without_an_answer_the_default_holds(slurm):
    slurm.fall_silent("scontrol")
    assert largest_array(9) == DEFAULT_LARGEST
