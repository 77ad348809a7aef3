import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config.trainer import Trainer
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.replica import Replica
from hpctrain.rank.compiler import spare_compiler
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.update import Clipping, JointUpdate, Update

ALONE = Replica(nn.Identity())


def clipped(**options):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, -4.0])
    unused = torch.zeros(1, requires_grad=True)
    clipping = Clipping.configured(Trainer(**options), torch.optim.SGD([weight, unused], lr=1.0), ALONE)
    norm = clipping()
    return weight.grad.tolist(), None if norm is None else norm.item()


@pytest.mark.parametrize(
    ("options", "gradients", "norm"),
    [
        ({"clip_grad_norm": 0.5}, [0.3, -0.4], 5.0),
        ({"clip_grad_norm": 50.0}, [3.0, -4.0], 5.0),
        ({"clip_grad_value": 3.5}, [3.0, -3.5], None),
        ({"clip_grad_norm": 0.5, "clip_grad_value": 0.35}, [0.3, -0.35], 5.0),
        ({"log_grad_norm": True}, [3.0, -4.0], 5.0),
        ({"log_grad_norm": True, "clip_grad_value": 1.0}, [1.0, -1.0], 5.0),
    ],
)
def test_by_norm_first_and_then_by_value(options, gradients, norm):
    found, measured = clipped(**options)
    assert found == pytest.approx(gradients, rel=1e-5)
    assert measured == (None if norm is None else pytest.approx(norm))


def test_nothing_where_nothing_is_configured():
    assert Clipping.configured(Trainer(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), ALONE) is None


class Scaled:
    """Optimizers that share a loss scale, over a weight each."""

    def __init__(self, *fused, clip=None, **options):
        self.weights = [torch.ones(2, requires_grad=True) for _ in fused]
        optimizers = [torch.optim.SGD([each], lr=1.0, fused=one) for each, one in zip(self.weights, fused, strict=True)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, **options)
        self.updates = [
            Update(
                optimizer,
                LearningRate(optimizer, lambda _: 1.0),
                name=str(number),
                clipping=Clipping.configured(Trainer(clip_grad_norm=clip), optimizer, ALONE),
                scaler=self.scaler,
            )
            for number, optimizer in enumerate(optimizers)
        ]
        self.joint = JointUpdate(self.updates, Meter(torch.device("cpu")), scaler=self.scaler)

    def backward(self, *factors):
        """Leave out the weights whose factor is None."""
        pairs = zip(self.weights, factors, strict=True)
        self.joint.backward(sum((weight * factor).sum() for weight, factor in pairs if factor is not None))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spared", [False, True])
def test_updates_that_overflow_are_counted_as_skipped(fused, spared):
    if spared:
        spare_compiler()
    bench = Scaled(fused)
    (weight,), (update,) = bench.weights, bench.updates
    for factor, skipped, scale in [(1.0, 0, 8.0), (math.inf, 1, 4.0), (math.nan, 2, 2.0), (1.0, 2, 2.0)]:
        before, skipped_before = weight.detach().clone(), update.num_skipped
        bench.backward(factor)
        assert bench.joint() is (update.num_skipped == skipped_before)
        assert update.num_skipped == skipped
        assert weight.grad is None
        assert torch.equal(weight, before) is (skipped > skipped_before)
        assert bench.scaler.get_scale() == bench.joint.loss_scale == scale


EACH = [(1.0, math.inf), (math.inf, 1.0), (1.0, 1.0), (math.nan, math.inf), (None, 1.0), (math.inf, None), (1.0, 1.0)]


@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("growth_interval", [1, 2])
def test_of_optimizers_that_share_a_scale_each_skips_for_itself(fused, clip, growth_interval):
    bench = Scaled(*fused, clip=clip, growth_interval=growth_interval)
    skipped, good, scale = [0, 0], 0, 8.0
    assert bench.joint.loss_scale == scale
    for factors in EACH:
        before = [weight.detach().clone() for weight in bench.weights]
        bench.backward(*factors)
        overflows = [factor is not None and not math.isfinite(factor) for factor in factors]
        assert bench.joint() is not all(overflows)
        skipped = [number + overflow for number, overflow in zip(skipped, overflows, strict=True)]
        assert [update.num_skipped for update in bench.updates] == skipped
        stayed = [torch.equal(weight, old) for weight, old in zip(bench.weights, before, strict=True)]
        assert stayed == [overflow or factor is None for overflow, factor in zip(overflows, factors, strict=True)]
        # the scale is of all of them together
        good = 0 if any(overflows) else good + 1
        scale = scale / 2 if any(overflows) else scale
        if good == growth_interval:
            scale, good = 2 * scale, 0
        assert bench.joint.loss_scale == bench.scaler.get_scale() == scale
        measured = [update.norm is not None for update in bench.updates]
        assert measured == [clip is not None and not overflow for overflow in overflows]


def test_a_scale_at_its_least_still_shows_what_was_skipped():
    bench = Scaled(True)
    bench.backward(1.0)
    bench.joint()
    bench.scaler.update(torch.tensor(2.0**-149))
    for skipped in (1, 2):
        bench.backward(math.inf)
        assert not bench.joint()
        assert (bench.updates[0].num_skipped, bench.joint.loss_scale) == (skipped, 0.0)


class Reads(TorchDispatchMode):
    """Counts the values that the host reads one by one, for each of which it would wait for a GPU."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "reads"), [((True, True), 0), ((True, False), 1), ((False, False), 2)])
def test_one_transfer_brings_what_fused_optimizers_skipped_and_the_scale(fused, reads):
    bench = Scaled(*fused)
    with Reads() as found:
        bench.backward(1.0, math.inf)
        bench.joint()
        assert found.number == reads
        if any(fused):
            assert bench.joint.loss_scale == 4.0
            assert found.number == reads
