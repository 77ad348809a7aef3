from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.errors import CheckpointError


def draw():
    return (
        torch.rand(5).tolist(),
        torch.randn(3).tolist(),
        np.random.rand(5).tolist(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
    )


@pytest.mark.parametrize("warm_up", [0, 1, 3], ids=["fresh", "half a gauss pair", "mid stream"])
def test_the_generators_continue_where_they_were(warm_up):
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    for _ in range(warm_up):
        draw()
    state = rng_state()
    expected = draw()
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    restore_rng(torch.load(buffer, weights_only=True))
    assert draw() == expected


def test_a_state_takes_kilobytes_not_lists_of_numbers():
    state = rng_state()
    tensors = (state["torch"], state["numpy"]["key"], state["random"]["state"])
    assert all(isinstance(value, torch.Tensor) for value in tensors)
    assert sum(value.nbytes for value in tensors) < 20_000


def test_numpys_generator_of_another_kind_is_an_error():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(CheckpointError, match="not an MT19937"):
            rng_state()
    finally:
        np.random.set_bit_generator(before)
