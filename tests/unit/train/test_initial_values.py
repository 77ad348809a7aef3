from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hpctrain.models.gpt import GPT
from hpctrain.models.resnet import ResNet
from hpctrain.train.initial_values import build_without_values


class Holding(nn.Module):
    """Parameters, modules and buffers by name, and anything else under `others`."""

    def __init__(self, others=None, **parts):
        super().__init__()
        self.others = others
        for name, part in parts.items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part, persistent=False)


def tensors_of(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def tied():
    model = Holding(tokens=nn.Embedding(10, 4), out=nn.Linear(4, 10, bias=False), table=torch.rand(3))
    model.out.weight = model.tokens.weight
    model.out.weight.requires_grad_(False).decays = False
    return model


def from_file():
    linear = nn.Linear(2, 3)
    linear.load_state_dict({"weight": torch.ones(3, 2, device="cpu"), "bias": torch.ones(3, device="cpu")})
    return linear


ON_META = {
    "gpt": lambda: GPT(num_layers=2),
    "resnet in half": lambda: ResNet(depth=18, num_classes=3).bfloat16(),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 6)),
    "from a file": from_file,
    "tied": tied,
    "on the CPU": lambda: Holding(weight=nn.Parameter(torch.ones(3, device="cpu")), ones=torch.ones(2, device="cpu")),
}


def aliased():
    table = torch.rand(3)
    return Holding(others={"tables": [table]}, table=table)


def drawn_on_the_cpu():
    return Holding(others=float(torch.rand((), device="cpu")), linear=nn.Linear(2, 3))


NOT_ON_META = {
    "reads a value": lambda: Holding(others=[float(one) for one in torch.linspace(0, 1, 3)], linear=nn.Linear(2, 3)),
    "converts to NumPy": lambda: Holding(others=torch.rand(3).numpy(), linear=nn.Linear(2, 3)),
    "has a tensor of its own": lambda: Holding(others=partial(torch.clone, torch.rand(3)), linear=nn.Linear(2, 3)),
    "has a buffer twice": aliased,
    "draws on the CPU": drawn_on_the_cpu,
}


def built(build):
    """A model without values, and an ordinary one, from the same random numbers."""
    torch.manual_seed(3)
    ordinary = build()
    torch.manual_seed(3)
    model = build_without_values(build)
    found, expected = tensors_of(model), tensors_of(ordinary)
    assert all(tensor.is_meta for tensor in found.values())
    assert [(name, one.shape, one.dtype, one.requires_grad, type(one)) for name, one in found.items()] == [
        (name, one.shape, one.dtype, one.requires_grad, type(one)) for name, one in expected.items()
    ]
    return model, ordinary


@pytest.mark.parametrize("name", ON_META)
def test_a_model_is_built_on_meta(name, caplog):
    model, _ = built(ON_META[name])
    assert not caplog.records
    if name == "tied":
        assert model.out.weight is model.tokens.weight
        assert model.out.weight.decays is False
    if name == "lstm":
        assert all(weight is tensor for weight, tensor in zip(model._flat_weights, model.parameters(), strict=True))


@pytest.mark.parametrize("name", NOT_ON_META)
def test_what_needs_values_has_those_of_an_ordinary_build(name, caplog):
    caplog.set_level(logging.WARNING)
    model, ordinary = built(NOT_ON_META[name])
    (record,) = caplog.records
    assert "this rank builds the whole model on the CPU" in record.getMessage()
    values = [one.others() if callable(one.others) else one.others for one in (model, ordinary)]
    torch.testing.assert_close(*values, rtol=0, atol=0)
    assert torch.equal(torch.rand(2), (torch.manual_seed(3), NOT_ON_META[name](), torch.rand(2))[2])


def test_a_parameter_that_a_list_keeps_has_no_values():
    """It stays as it is when the model gets shards: a model that computes with it wouldn't be trained."""

    def build():
        linear = nn.Linear(2, 3)
        return Holding(others=[linear.weight, linear.weight.detach().clone()], linear=linear)

    kept, copy = build_without_values(build).others
    assert kept.isnan().all()
    assert copy.isfinite().all()


def test_an_error_of_the_model_passes_through():
    with pytest.raises(ZeroDivisionError):
        build_without_values(lambda: nn.Linear(1 // 0, 2))
    assert torch.ones(2).sum().item() == 2
