import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpctrain.errors import CheckpointError
from hpctrain.train.ema import Ema


def trained(model, update, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


def test_it_is_torchs_own_average(model):
    ema = Ema(model, 0.9)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    # torch's first update copies the weights, ours begins with them
    reference.update_parameters(model)
    trained(model, lambda: (ema.update(), reference.update_parameters(model)))
    for name, average in ema.averages.items():
        assert torch.equal(average, dict(reference.module.named_parameters())[name])


def test_the_model_has_it_within_and_its_own_weights_again_afterwards(model):
    ema = Ema(model, 0.5)
    trained(model, ema.update)
    before = [parameter.clone() for parameter in model.parameters()]
    with ema.in_place():
        assert all(torch.equal(p, a) for p, a in zip(model.parameters(), ema.averages.values(), strict=True))
        assert not torch.equal(next(model.parameters()), before[0])
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_it_goes_on_from_saved_averages(model):
    ema = Ema(model, 0.9)
    trained(model, ema.update)
    saved = {name: average.clone() for name, average in ema.averages.items()}
    again = Ema(model, 0.9)
    again.load_state({"ema": saved})
    assert all(torch.equal(again.averages[name], saved[name]) for name in saved)


def test_averages_of_another_model_are_refused(model):
    with pytest.raises(CheckpointError, match=r"other names.*optimizer\.groups"):
        Ema(model, 0.9).load_state({"ema": {"weight": torch.zeros(1)}})


def test_the_average_of_half_weights_is_fp32_and_does_not_lose_small_updates(model):
    model.to(torch.bfloat16)
    ema, wide = Ema(model, 0.999), [parameter.detach().float() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update()
    for average, before, parameter in zip(ema.averages.values(), wide, model.parameters(), strict=True):
        assert average.dtype == torch.float32
        assert torch.allclose(average, before + 0.001 * (parameter.float() - before))
    own = [parameter.clone() for parameter in model.parameters()]
    with ema.in_place():
        assert next(model.parameters()).dtype == torch.bfloat16
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(model.parameters(), own, strict=True))
