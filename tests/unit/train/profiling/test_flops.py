from __future__ import annotations

import logging
import random
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hpctrain.data.plan import BatchPlan
from hpctrain.tasks.task import Task
from hpctrain.train.profiling.flops import PEAKS, FlopCount, FlopCounter, flops_by_trial, is_compiled, peak_flops

PLAN = BatchPlan(1200, global_batch_size=12, micro_batch_size=6, world_size=1, drop_last=False)


def test_linear_layers():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    features = torch.randn(8, 64)
    with FlopCount() as count:
        model(features).sum().backward()
    forward = 2 * 8 * (64 * 32 + 32 * 10)
    # backward: the weights' gradients of both, the inputs' of the second alone
    assert count.total == 2 * forward + 2 * 8 * 32 * 10


def test_convolutions():
    model = nn.Conv2d(3, 8, 3, bias=False)
    with FlopCount() as count:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert count.total == 2 * (2 * 2 * 8 * 6 * 6 * 3 * 9)


def test_attention_on_the_cpu():
    shape = (2, 4, 16, 8)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with FlopCount() as count:
        result = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    forward = 2 * 2 * (2 * 4 * 16 * 16 * 8)
    assert count.total == forward
    with FlopCount() as count:
        result.sum().backward()
    assert count.total == 2.5 * forward


def test_counting_does_not_change_results():
    def trained(*, counted):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            with FlopCount() if counted else torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(4, 1, 8, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([value.flatten() for value in model.state_dict().values()])

    assert torch.equal(trained(counted=True), trained(counted=False))


def branch(layer, x):
    return torch.cond(x.sum() > 0, layer, torch.neg, (x,))


def flexible(layer, x):
    from torch.nn.attention.flex_attention import flex_attention

    query = layer(x).detach().view(1, 2, 16, 8)
    return flex_attention(query, query, query).sum() + layer(x)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("function", "flops"),
    [(branch, 0), (flexible, 3 * 2 * 32 * 8 * 8 + 2 * 2 * (2 * 16 * 16 * 8))],
    ids=["torch.cond", "flex_attention"],
)
def test_counting_does_not_change_operators_that_call_the_compiler(function, flops):
    """In a mode that the compiler notices, torch.cond gives no gradient to what its branches close over."""

    def gradient(*, counted):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        with FlopCount() if counted else nullcontext() as count:
            function(layer, torch.ones(32, 8)).square().sum().backward()
        if counted:
            assert count.total == flops
        return layer.weight.grad

    assert torch.equal(gradient(counted=True), gradient(counted=False))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_formula_that_fails_only_ends_the_counting(caplog):
    caplog.set_level(logging.INFO, "hpctrain.train")
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    square = torch.nested.nested_tensor([torch.eye(3), torch.eye(3)])
    with FlopCount() as count:
        torch.eye(3) @ torch.eye(3)
        product = torch.bmm(ragged, square)
        torch.eye(3) @ torch.eye(3)
    assert [part.shape for part in product.unbind()] == [(2, 3), (4, 3)]
    assert count.total is None
    assert len(caplog.records) == 1
    assert "FLOPs are not counted: torch's formula for aten.bmm" in caplog.text


def test_counting_does_not_import_the_compiler():
    program = (
        "import sys, torch; from hpctrain.train.profiling.flops import FlopCount; model = torch.nn.Linear(2, 2)\n"
        "with FlopCount() as count: model(torch.ones(1, 2)).sum().backward()\n"
        "assert count.total; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 311.9),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16_master", 756.5),
        ("NVIDIA H100 NVL", "tf32", 417.5),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA GH200 480GB", "bf16_pure", 989.4),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.1),
        ("NVIDIA A10", "bf16", 124.9),
        ("NVIDIA A10G", "bf16", None),
        ("Some card of next year", "bf16", None),
    ],
)
def test_peaks(name, precision, tflops):
    assert peak_flops(name, precision) == (None if tflops is None else tflops * 1e12)


def test_no_name_in_the_table_hides_a_later_one():
    for place, (name, _) in enumerate(PEAKS):
        assert peak_flops(f"NVIDIA {name}", "fp32") == PEAKS[place][1][2] * 1e12


class Ragged(nn.Linear):
    """Has a product for which torch's formula fails."""

    def forward(self, features):
        parts = torch.nested.nested_tensor([features[:2], features[2:]])
        product = torch.bmm(parts, torch.nested.nested_tensor([torch.eye(8), torch.eye(8)]))
        return super().forward(torch.cat(product.unbind()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("kind", "flops"), [(nn.Linear, 2 * 2 * 8 * 10), (Ragged, None)])
def test_a_step_is_done_even_if_its_flops_cannot_be_counted(step_over, supply, lone_world, kind, flops):
    model = kind(8, 10)
    before = model.weight.detach().clone()
    counter = FlopCounter(step_over(model), PLAN, lone_world, "fp32", None)
    counter.in_step(0, supply())
    assert counter.per_sample == flops
    assert not torch.equal(model.weight, before)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))


def state(model):
    values = [value.flatten().double() for value in model.state_dict().values()]
    return torch.cat([*values, torch.random.get_rng_state().double()]), random.getstate()


def test_a_trial_counts_what_a_step_counts_and_changes_nothing(step_over, supply, lone_world):
    model = network()
    step = step_over(model)
    before = state(model)
    found = flops_by_trial(step, next(supply()), lone_world)
    after = state(model)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert all(parameter.grad is None for parameter in model.parameters())
    with FlopCount() as count:
        step(0, supply())
    assert found == count.total / 12


class Teacher(nn.Sequential):
    """The second layer's weights follow the first one's, as a momentum encoder's do."""

    def forward(self, features):
        with torch.no_grad():
            self[1].weight.lerp_(self[0].weight, 0.1)
        return super().forward(features)


def test_a_trial_undoes_what_the_forward_pass_does_to_frozen_parameters(step_over, supply, lone_world):
    model = Teacher(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 10))
    before = model[1].weight.clone()
    assert flops_by_trial(step_over(model), next(supply()), lone_world)
    assert torch.equal(model[1].weight, before)


def test_a_trial_uses_the_uncompiled_model(step_over, supply, lone_world):
    plain, compiled = network(), network()
    assert not is_compiled(step_over(plain))
    compiled[0].compile(backend="eager")
    step = step_over(compiled)
    assert is_compiled(step)
    assert is_compiled(step_over(nn.Sequential(torch.compile(network(), backend="eager"))))
    forward_alone = network()
    forward_alone.forward = torch.compile(forward_alone.forward, backend="eager")
    assert is_compiled(step_over(nn.Sequential(forward_alone)))
    step(0, supply())
    micro_batch = next(supply())
    assert flops_by_trial(step, micro_batch, lone_world) == flops_by_trial(step_over(plain), micro_batch, lone_world)


class Whole(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return model(batch[0]).reshape(6, 10).mean()


def test_a_trial_that_fails_counts_nothing(step_over, supply, lone_world):
    assert flops_by_trial(step_over(network(), Whole()), next(supply()), lone_world) is None
    nothing = next(supply())._replace(num_samples=0)
    assert flops_by_trial(step_over(network()), nothing, lone_world) is None
