from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError, TaskError
from hpctrain.models.gpt import GPT

SMALL = {"vocab_size": 11, "context_length": 8, "num_layers": 2, "num_heads": 2, "width": 16}


def test_a_position_sees_itself_and_those_before_it() -> None:
    torch.manual_seed(0)
    network = GPT(**SMALL)
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = network(tokens), network(changed)
    assert before.shape == (1, 8, 11)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert all(not torch.allclose(before[0, place], after[0, place]) for place in range(5, 8))


def test_it_starts_at_the_loss_of_guessing() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 33))
    loss = F.cross_entropy(GPT(num_layers=2)(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_weights_start_as_gpt2s() -> None:
    torch.manual_seed(0)
    network = GPT(num_layers=8)
    deviations = {name: parameter.std().item() for name, parameter in network.named_parameters()}
    assert deviations["tokens.weight"] == pytest.approx(0.02, rel=0.05)
    assert deviations["blocks.3.attention.qkv.weight"] == pytest.approx(0.02, rel=0.05)
    assert deviations["blocks.3.attention.out.weight"] == pytest.approx(0.005, rel=0.05)
    assert deviations["blocks.3.feed_forward.out.weight"] == pytest.approx(0.005, rel=0.05)
    assert all(value == 0 for name, value in deviations.items() if name.endswith("bias"))


def test_it_learns_to_repeat() -> None:
    torch.manual_seed(0)
    network = GPT(**SMALL)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-2)
    tokens = torch.arange(9).repeat(4, 1)
    for _ in range(30):
        loss = F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


@pytest.mark.parametrize(
    ("option", "parameters"),
    {"gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_sizes_of_gpt2(option: str, parameters: int) -> None:
    chosen = {key: value for key, value in Composer().compose([f"model={option}"]).model.items() if key != "_target_"}
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(**chosen).parameters()) == parameters


def test_dropout_is_for_training() -> None:
    network = GPT(**SMALL, dropout=0.5)
    tokens = torch.randint(0, 11, (1, 8))
    assert not torch.equal(network(tokens), network(tokens))
    network.eval()
    assert torch.equal(network(tokens), network(tokens))


def test_the_error_of_a_size_that_does_not_fit_names_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_heads=3: .*model\.width=16"):
        GPT(num_heads=3, width=16)
    with pytest.raises(TaskError, match=r"model\.context_length=9 or more"):
        GPT(**SMALL)(torch.zeros(1, 9, dtype=torch.long))
