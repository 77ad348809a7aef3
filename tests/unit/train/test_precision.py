from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.config.precision import FORMATS
from hpctrain.train.precision import (
    MasterWeights,
    autocast,
    compute_in,
    order_channels_last,
    set_fp32_precision,
    slow_precision_reason,
)

CPU = torch.device("cpu")
HALF = torch.float16


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
    compute_in(dtype, model, outer_dtype=torch.float32)
    labels, wide = torch.arange(3), torch.ones(3, dtype=torch.float64)
    found = model({"x": torch.ones(3), "wide": wide}, labels=labels, mask=None)
    (batch,), options = model.seen
    assert (batch["x"].dtype, batch["wide"].dtype) == (dtype, torch.float64)
    assert options["labels"] is labels
    assert found["logits"].dtype == torch.float32
    assert found["labels"] is labels


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16_pure", "fp16_master"])
def test_what_is_no_autocast_enters_none(kind):
    with autocast(FORMATS[kind], CPU):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_autocast_is_entered_any_number_of_times(kind, dtype):
    context = autocast(FORMATS[kind], CPU)
    for _ in range(2):
        with context:
            assert torch.get_autocast_dtype("cpu") == dtype


OPERATIONS = ("matmul", "conv", "rnn")


def in_tf32():
    """What torch computes in TF32 on a GPU, by its newer API."""
    return [torch._C._get_fp32_precision_getter("cuda", operation) == "tf32" for operation in OPERATIONS]


@pytest.fixture
def torchs_precision():
    """Restores torch's default."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.usefixtures("torchs_precision")
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "bf16_pure", "fp16_master"])
def test_tf32_is_for_one_run_and_not_for_the_next(kind):
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    set_fp32_precision(FORMATS[kind])
    assert in_tf32() == [False, False, False]
    set_fp32_precision(FORMATS["tf32"])
    assert in_tf32() == [True, True, True]
    assert torch.get_float32_matmul_precision() == "high"
    set_fp32_precision(FORMATS[kind])
    assert in_tf32() == [False, False, False]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("torchs_precision")
@pytest.mark.parametrize("kind", ["fp32", "tf32"])
def test_what_a_program_has_set_by_torchs_newer_api_is_overwritten_and_torch_can_be_asked_by_the_older_one(kind):
    """torch raises an error where the two differ; its compiler asks by the older one."""
    before = {"matmul": torch.backends.cuda.matmul, "conv": torch.backends.cudnn.conv, "rnn": torch.backends.cudnn.rnn}
    for operation in before.values():
        operation.fp32_precision = "ieee" if kind == "tf32" else "tf32"
    set_fp32_precision(FORMATS[kind])
    assert in_tf32() == [kind == "tf32"] * 3
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is (kind == "tf32")


def test_what_gains_nothing_on_a_cpu_is_told():
    assert "try bf16" in slow_precision_reason(FORMATS["fp16"], CPU)
    assert slow_precision_reason(FORMATS["bf16"], CPU) is None


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


@pytest.mark.parametrize(
    "dress", [order_channels_last, lambda model: compute_in(HALF, model.to(HALF), outer_dtype=torch.float32)]
)
def test_a_replica_of_data_parallel_computes_with_its_own_weights(dress):
    """Hooks move with a replica; a method that is an attribute of the model would stay bound to the model."""
    model = nn.Conv2d(2, 3, 1)
    dress(model)
    replica = model._replicate_for_data_parallel()
    for name, parameter in model.named_parameters():
        setattr(replica, name, 2 * parameter.detach())
    picture = torch.randn(2, 2, 4, 4)
    assert torch.allclose(replica(picture), 2 * model(picture))


class OwnNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        assert x.dtype == torch.float32
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Model(nn.Module):
    """Tied weights, norms of several kinds, a frozen part, buffers of which one changes in training."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 6)
        self.norms = nn.Sequential(nn.BatchNorm1d(6), nn.LayerNorm(6), nn.RMSNorm(6), OwnNorm(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 4, bias=False)
        self.out.weight = nn.Parameter(self.into.weight.detach().t().contiguous())
        self.tied = self.out
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 0.5
        self.calls += 1
        return self.tied(self.norms(self.frozen(self.into(x))))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = Model()
    master = MasterWeights(model, HALF)
    compute_in(HALF, master.copy, outer_dtype=torch.float32)
    return model, master


def test_the_copy_is_half_but_for_its_norms_which_are_the_models_own(pair):
    model, master = pair
    formats = {name: value.dtype for name, value in master.copy.state_dict().items()}
    assert {name for name, dtype in formats.items() if dtype == HALF} == {
        "into.weight", "into.bias", "frozen.weight", "frozen.bias", "out.weight", "tied.weight", "seen"
    }  # fmt: skip
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
    assert master.copy.norms[0].weight is model.norms[0].weight
    assert master.copy.norms[0].running_mean is model.norms[0].running_mean
    assert master.copy.tied.weight is master.copy.out.weight


def test_gradients_arrive_in_fp32_and_updates_go_back(pair):
    model, master = pair
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        loss = master.copy(torch.randn(8, 4)).square().mean()
        assert loss.dtype == torch.float32
        loss.backward()
        half = master.copy.into.weight.grad.clone()
        master.collect_gradients()
        assert torch.equal(model.into.weight.grad, half.float())
        assert model.into.weight.grad.dtype == torch.float32
        assert master.copy.into.weight.grad is None
        assert model.frozen.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        master.publish()
    for name, value in model.state_dict().items():
        assert torch.equal(master.copy.state_dict()[name], value.to(master.copy.state_dict()[name].dtype))
        assert torch.equal(value, before[name]) == name.startswith("frozen"), name


def test_a_parameter_that_was_left_out_has_no_gradient(pair):
    model, master = pair
    model.into.weight.grad = torch.ones_like(model.into.weight)
    master.collect_gradients()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "norms" not in name)


def test_what_is_saved_is_loaded_again_bit_for_bit(pair):
    model, master = pair
    master.copy(torch.randn(8, 4))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert (saved["seen"].item(), saved["calls"].item()) == (0.5, 1)
    torch.manual_seed(1)
    other = Model()
    again = MasterWeights(other, HALF)
    other.load_state_dict(saved)
    for name, value in master.copy.state_dict().items():
        assert torch.equal(again.copy.state_dict()[name], value), name
