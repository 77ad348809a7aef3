from __future__ import annotations

import pytest

from hpctrain.cli.fit_batch import RESOLUTION, BatchSearch, BatchTrial

MODEL, SAMPLE = 1000, 7


class Machine:
    """Where a batch takes MODEL + SAMPLE bytes for each sample, and a size above `dies` ends the process."""

    def __init__(self, limit, *, dies=None):
        self.limit, self.dies, self.tried = limit, dies or 10**9, []

    def __call__(self, size):
        self.tried.append(size)
        if size > self.dies:
            return BatchTrial(micro_batch_size=size, fits=False, peak_bytes=None)
        peak = MODEL + SAMPLE * size
        return BatchTrial(micro_batch_size=size, fits=peak <= self.limit, peak_bytes=peak)


def searched(machine, largest=10**6, *, careful=False):
    search = BatchSearch(limit_bytes=machine.limit, largest=largest, careful=careful)
    while (size := search.next_size()) is not None:
        search.record(search.prediction(size) or machine(size))
    return search.fits, search


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 3, 10, 17, 100, 1000, 12345])
def test_it_finds_the_largest_that_fits(samples, careful):
    machine = Machine(MODEL + SAMPLE * samples + 3)
    found, _ = searched(machine, careful=careful)
    assert found <= samples <= found + max(1, found // RESOLUTION)
    assert len(machine.tried) <= 30


def test_not_even_one_sample_fits():
    machine = Machine(MODEL)
    assert searched(machine)[0] == 0
    assert machine.tried == [1]


@pytest.mark.parametrize("largest", [1, 2, 7, 64, 100])
def test_the_largest_of_interest_is_tried_and_no_larger_one(largest):
    machine = Machine(10**9)
    assert searched(machine, largest)[0] == largest
    assert max(machine.tried) == largest


def test_a_process_that_dies_does_not_fit():
    machine = Machine(10**9, dies=100)
    assert 94 <= searched(machine, 10**4)[0] <= 100


def test_with_care_nothing_is_tried_that_is_expected_not_to_fit():
    machine = Machine(MODEL + SAMPLE * 100)
    found, search = searched(machine, careful=True)
    assert max(machine.tried) <= 100
    assert next(one.micro_batch_size for one in search.trials if one.predicted) == 128
    assert found >= 94
    careless = Machine(MODEL + SAMPLE * 100)
    searched(careless)
    assert max(careless.tried) == 128
