from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.train.precision import accept_fp32, autocast, choose_matmul_precision, order_channels_last, poor_fit

CPU = torch.device("cpu")


class Recorder(nn.Module):
    """Keeps what it is called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *arguments, **options):
        self.seen = arguments, options
        first = arguments[0]
        return {"logits": first["x"] * self.weight, "labels": options.get("labels")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_model_takes_and_gives_fp32_and_leaves_the_rest(dtype):
    model = Recorder().to(dtype)
    accept_fp32(model, dtype)
    labels, wide = torch.arange(3), torch.ones(3, dtype=torch.float64)
    found = model({"x": torch.ones(3), "wide": wide}, labels=labels, mask=None)
    (batch,), options = model.seen
    assert (batch["x"].dtype, batch["wide"].dtype) == (dtype, torch.float64)
    assert options["labels"] is labels
    assert found["logits"].dtype == torch.float32
    assert found["labels"] is labels


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16_pure", "fp16_master"])
def test_what_is_no_autocast_enters_none(kind):
    with autocast(kind, CPU):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_autocast_is_entered_any_number_of_times(kind, dtype):
    context = autocast(kind, CPU)
    for _ in range(2):
        with context:
            assert torch.get_autocast_dtype("cpu") == dtype


def test_tf32_is_for_one_run_and_not_for_the_next():
    choose_matmul_precision("tf32")
    assert torch.get_float32_matmul_precision() == "high"
    choose_matmul_precision("fp32")
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_gains_nothing_on_a_cpu_is_told():
    assert "try bf16" in poor_fit("fp16", CPU)
    assert poor_fit("bf16", CPU) is None


def test_channels_last_is_a_layout_and_nothing_else():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    picture = torch.randn(2, 3, 8, 8)
    expected = model(picture)
    seen = []
    order_channels_last(model)
    model[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    found = model(picture)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
