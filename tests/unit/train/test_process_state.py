from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from hpctrain.train.process_state import process_state_restored


def trained():
    """The weights of a layer after two steps, as its process computes them by default, one of both precisions each."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    for _ in range(2):
        loss = layers[0](torch.randn(4, 3)).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            inputs = torch.randn(2, 4, 3)
            loss = loss + (layers[1](inputs[0]) * layers[1](inputs[1])).float().sum()
        loss.backward()
        with torch.no_grad():
            for layer in layers:
                layer.weight -= layer.weight.grad
    return torch.cat([layer.weight for layer in layers])


def settings():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
    )


@pytest.mark.parametrize(
    "contexts",
    [
        [lambda: torch.autocast("cpu", torch.bfloat16)],
        [lambda: torch.autocast("cpu", enabled=False, cache_enabled=False), lambda: torch.autocast("cpu")],
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
        before = settings()
        with process_state_restored():
            found = trained()
        assert settings() == before
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)
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
