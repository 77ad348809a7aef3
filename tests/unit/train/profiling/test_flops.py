from __future__ import annotations

import logging
import random
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from hpctrain.config.precision import FORMATS
from hpctrain.data.plan import BatchPlan
from hpctrain.parallel.ddp import DataParallelReplica
from hpctrain.tasks.task import Task
from hpctrain.train.profiling.flops import FlopCounter, FlopCountMode, flops_by_trial, hides_operators, peak_flops
from hpctrain.train.task_state import TaskState

PLAN = BatchPlan(1200, global_batch_size=12, micro_batch_size=6, world_size=1, drop_last=False)


def test_linear_layers():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    features = torch.randn(8, 64)
    with FlopCountMode() as count:
        model(features).sum().backward()
    forward = 2 * 8 * (64 * 32 + 32 * 10)
    # backward: the weights' gradients of both, the inputs' of the second alone
    assert count.total == 2 * forward + 2 * 8 * 32 * 10


def test_convolutions():
    model = nn.Conv2d(3, 8, 3, bias=False)
    with FlopCountMode() as count:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert count.total == 2 * (2 * 2 * 8 * 6 * 6 * 3 * 9)


def test_attention_on_the_cpu():
    shape = (2, 4, 16, 8)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with FlopCountMode() as count:
        result = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    forward = 2 * 2 * (2 * 4 * 16 * 16 * 8)
    assert count.total == forward
    with FlopCountMode() as count:
        result.sum().backward()
    assert count.total == 2.5 * forward


def test_attention_with_fewer_heads_in_keys_and_values():
    """As much as with all heads, which torch 2.11's own formulas refuse to count."""

    def counted(num_heads):
        query = torch.randn(2, 4, 16, 8, requires_grad=True)
        key, value = (torch.randn(2, num_heads, 16, 8, requires_grad=True) for _ in range(2))
        with FlopCountMode() as count:
            nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum().backward()
        return count.total

    assert counted(2) == counted(4) == (2 + 5) * 2 * (2 * 4 * 16 * 16 * 8)


def test_counting_does_not_change_results():
    def trained(*, counted):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            with FlopCountMode() if counted else torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
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


HAS_FLEX = any(str(target) == "flex_attention" for target in flop_registry)
"""torch 2.11 has no formula for flex_attention, 2.13 has one."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("function", "flops"),
    [(branch, 0), (flexible, 3 * 2 * 32 * 8 * 8 + HAS_FLEX * 2 * 2 * (2 * 16 * 16 * 8))],
    ids=["torch.cond", "flex_attention"],
)
def test_counting_does_not_change_operators_that_call_the_compiler(function, flops):
    """In a mode that the compiler notices, torch.cond gives no gradient to what its branches close over."""

    def gradient(*, counted):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        with FlopCountMode() if counted else nullcontext() as count:
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
    with FlopCountMode() as count:
        torch.eye(3) @ torch.eye(3)
        product = torch.bmm(ragged, square)
        torch.eye(3) @ torch.eye(3)
    assert [part.shape for part in product.unbind()] == [(2, 3), (4, 3)]
    assert count.total is None
    assert len(caplog.records) == 1
    assert "FLOPs are not counted: torch's formula for aten.bmm" in caplog.text


def test_counting_does_not_import_the_compiler():
    program = (
        "import sys, torch; from hpctrain.train.profiling.flops import FlopCountMode; model = torch.nn.Linear(2, 2)\n"
        "with FlopCountMode() as count: model(torch.ones(1, 2)).sum().backward()\n"
        "assert count.total; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("names", "tflops"),
    [
        (["NVIDIA B200"], (2250.0, 1125.0, 75.0)),
        (
            ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"],
            (989.4, 494.7, 66.9),
        ),
        (["NVIDIA H100 NVL", "NVIDIA H200 NVL"], (835.5, 417.5, 60.0)),
        (["NVIDIA H100 PCIe"], (756.5, 378.0, 51.2)),
        (
            [
                "NVIDIA A100-SXM4-40GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-PCIE-40GB",
                "NVIDIA A100 80GB PCIe",
                "A100-SXM4-40GB",  # drivers before 470
            ],
            (311.9, 155.9, 19.5),
        ),
        (["NVIDIA A40"], (149.7, 74.8, 37.4)),
        (["NVIDIA A10"], (124.9, 62.4, 31.2)),
        (["NVIDIA L40S"], (362.1, 183.2, 91.6)),
        (["NVIDIA L4"], (121.0, 60.2, 30.3)),
        (["NVIDIA RTX A6000"], (154.8, 77.4, 38.7)),
        (["NVIDIA GeForce RTX 4090"], (165.2, 82.6, 82.6)),
        (["NVIDIA GeForce RTX 3090"], (71.2, 35.6, 35.6)),
        (["Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"], (125.0, None, 15.7)),
        (["Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"], (112.0, None, 14.0)),
        (["Tesla T4"], (65.1, None, 8.1)),
        (["AMD Instinct MI300X"], (1307.4, 653.7, 163.4)),
    ],
)
def test_peaks(names, tflops):
    half, tf32, full = (None if peak is None else peak * 1e12 for peak in tflops)
    expected = {"fp32": full, "tf32": tf32, "bf16": half, "fp16": half, "bf16_pure": half, "fp16_master": half}
    for name in names:
        found = {precision: peak_flops(name, formats.products) for precision, formats in FORMATS.items()}
        assert found == expected, name


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10G",
        "NVIDIA A16",
        "NVIDIA L40",
        "NVIDIA GB200",
        "NVIDIA H20",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX A6000 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA T400",
        "Tesla V100-SXM3-32GB",
        "Tesla V100S-PCIE-32GB",
        "AMD Instinct MI300A",
        "Some card of next year",
    ],
)
def test_a_card_with_a_similar_name_and_a_slice_of_a_gpu_have_no_known_peak(name):
    assert peak_flops(name, "bf16") is None


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
    with FlopCountMode() as count:
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
    assert not hides_operators(step_over(plain))
    compiled[0].compile(backend="eager")
    step = step_over(compiled)
    assert hides_operators(step)
    assert hides_operators(step_over(nn.Sequential(torch.compile(network(), backend="eager"))))
    forward_alone = network()
    forward_alone.forward = torch.compile(forward_alone.forward, backend="eager")
    assert hides_operators(step_over(nn.Sequential(forward_alone)))
    step(0, supply())
    micro_batch = next(supply())
    assert flops_by_trial(step, micro_batch, lone_world) == flops_by_trial(step_over(plain), micro_batch, lone_world)


def test_the_threads_of_data_parallel_hide_operators_and_a_trial_sees_them(step_over, supply, lone_world):
    model = network()
    step, micro_batch = step_over(model), next(supply())
    expected = flops_by_trial(step, micro_batch, lone_world)
    step.turns[0].module.replica = DataParallelReplica(model, lone_world)
    counter = FlopCounter(step, PLAN, lone_world, "fp32", None)
    assert counter.by_trial
    assert list(counter.before_step(iter([micro_batch]), TaskState(Whole(), lone_world))) == [micro_batch]
    assert counter.per_sample == expected


class Whole(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return model(batch[0]).reshape(6, 10).mean()


def test_a_trial_that_fails_counts_nothing(step_over, supply, lone_world):
    assert flops_by_trial(step_over(network(), Whole()), next(supply()), lone_world) is None
    nothing = next(supply())._replace(num_samples=0)
    assert flops_by_trial(step_over(network()), nothing, lone_world) is None
