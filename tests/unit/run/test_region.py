from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.run.region import Region


def indices(region):
    return set(itertools.product(*(range(each.start, each.stop) for each in region.slices())))


def boxes(dimensions):
    numbers = st.tuples(*[st.integers(0, 5)] * dimensions)
    return st.builds(Region, numbers, numbers)


@given(st.integers(0, 3).flatmap(lambda dimensions: st.tuples(boxes(dimensions), boxes(dimensions))))
def test_what_lies_in_both_boxes(pair):
    one, other = pair
    shared = one.intersect(other)
    assert shared == other.intersect(one)
    assert (indices(shared) if shared else set()) == indices(one) & indices(other)
    assert one.numel == len(indices(one))


@given(st.integers(0, 3).flatmap(lambda dimensions: st.tuples(boxes(dimensions), boxes(dimensions))))
def test_offsets_counted_from_the_begin_of_another_box(pair):
    one, outer = pair
    inner = one.intersect(outer)
    if inner is not None:
        relative = inner.relative_to(outer)
        assert relative.intersect(Region.whole(outer.sizes)) == relative
        assert Region(tuple(map(sum, zip(relative.offsets, outer.offsets, strict=True))), relative.sizes) == inner


def test_a_tensor_without_dimensions_has_one_element():
    scalar = Region.whole(())
    assert (scalar, scalar.numel, scalar.slices()) == (Region((), ()), 1, ())
    assert scalar.intersect(scalar) == scalar


def test_boxes_of_different_numbers_of_dimensions_are_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        Region.whole((2, 3)).intersect(Region.whole((2,)))
