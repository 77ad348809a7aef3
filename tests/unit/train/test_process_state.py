from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from hpctrain.train.process_state import process_state_restored


def trained():
    """The weights of a layer after a step, as its process computes it by default."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    layer(torch.randn(4, 3)).square().sum().backward()
    with torch.no_grad():
        layer.weight -= layer.weight.grad
    return layer.weight


@pytest.mark.parametrize(
    "contexts",
    [
        [lambda: torch.autocast("cpu", torch.bfloat16)],
        [torch.no_grad],
        [torch.inference_mode],
        [lambda: torch.device("meta")],
        [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, lambda: torch.device("meta")],
    ],
)
def test_contexts_of_the_program_change_no_weights(contexts):
    expected = trained()
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        before = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_device()
        with process_state_restored():
            found = trained()
        assert (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_device()) == before
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "value"), [("dtype", torch.float64), ("device", torch.device("meta"))])
def test_defaults_of_the_program_change_no_weights_and_come_back(name, value):
    expected = trained()
    before = getattr(torch, f"get_default_{name}")()
    getattr(torch, f"set_default_{name}")(value)
    try:
        with process_state_restored():
            found = trained()
        assert getattr(torch, f"get_default_{name}")() == value
    finally:
        getattr(torch, f"set_default_{name}")(None if name == "device" else before)
    assert torch.equal(found, expected)
