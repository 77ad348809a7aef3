from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hpctrain.config.parallel import Parallel
from hpctrain.config.precision import FORMATS, Precision
from hpctrain.config.trainer import Trainer
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.errors import TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.ddp import DdpReplica
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.replica import LossModule, Replica
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task
from hpctrain.train.ema import Ema
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.precision import gradient_scaler
from hpctrain.train.step import Loss, TrainStep, Turn
from hpctrain.train.task_log import AttachedLog, attach
from hpctrain.train.trained_module import GradientCheck, TrainedModule
from hpctrain.train.update import Clipping, JointUpdate, Update, unknown_optimizers_refused

CPU = torch.device("cpu")
LONE = TrainingWorld(rank=0, size=1, local_rank=0, devices=(CPU,))


class Classify(Task):
    """Keeps the dtype of the logits that it saw, and scales its loss."""

    factor = 1.0

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        features, labels = batch
        logits = model(features)
        self.dtype = logits.dtype
        return cross_entropy(logits, labels) * self.factor


def checks(loss, module, joint, parallel=None):
    """Of gradients that DDP averages if `parallel` is given."""
    world = LONE if parallel is None else TrainingWorld(rank=0, size=2, local_rank=0, devices=(CPU,))
    return GradientCheck(loss.method, module, joint, parallel or Parallel(), world.share)


class Bench:
    """A step over a model in float64, and what it needs."""

    def __init__(
        self,
        *,
        kind="fp32",
        lr=1.0,
        clip=None,
        value=None,
        task=None,
        dtype=torch.float64,
        ema=None,
        scaler=None,
        replica_of=Replica,
        parallel=None,
    ):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3, dtype=dtype)
        self.task = task or Classify()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.meter = Meter(CPU, names=("train/loss",))
        self.asked = []
        self.ema = None if ema is None else Ema(self.model, ema)
        bounds, replica = Trainer(clip_grad_norm=clip, clip_grad_value=value), replica_of(self.model)
        self.update = Update(
            self.optimizer,
            LearningRate(self.optimizer, lambda update: self.asked.append(update) or 1 / (1 + update)),
            clipping=Clipping.configured(bounds, self.optimizer, replica),
            scaler=scaler,
        )
        self.position = Position()
        self.log = AttachedLog("Task", self.position, total_steps=10, every_steps=2)
        attach(self.task, self.log, self.position)
        loss = Loss(self.task, self.meter, self.log, precision=FORMATS[kind], device=CPU)
        trained_from = [(parameter, 0) for parameter in self.model.parameters()]
        module = TrainedModule(self.model, trained_from, replica)
        joint = JointUpdate([self.update], self.meter, scaler=scaler)
        gradients = checks(loss, module, joint, parallel)
        self.turn = Turn(loss, module, joint, gradients)
        self.step = TrainStep([self.turn], LONE, None, self.ema)
        self.step.build_replicas(0)
        draws = torch.Generator().manual_seed(1)
        self.batch = torch.randn(12, 4, generator=draws, dtype=dtype), torch.arange(12) % 3

    def micro_batches(self, *sizes):
        """The batch in pieces, as the loader gives them; a size of zero is a stand-in."""
        begin, total = 0, sum(sizes)
        for number, size in enumerate(sizes):
            indices = torch.arange(begin, begin + (size or 1)) % total
            begin += size
            yield MicroBatch(
                batch=tuple(tensor[indices] for tensor in self.batch),
                num_samples=size,
                divisor=total / size if size else math.inf,
                is_last=number == len(sizes) - 1,
                indices=indices.numpy(),
            )

    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def moved(self, *sizes, step=0):
        """How far one step moves the weights."""
        before = self.weights()
        self.step(step, self.micro_batches(*sizes))
        return before - self.weights()


def gradient(bench):
    """Of the mean loss over the whole batch."""
    features, labels = bench.batch
    gradients = torch.autograd.grad(cross_entropy(bench.model(features), labels), list(bench.model.parameters()))
    return torch.cat([item.flatten() for item in gradients])


@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (1,) * 12, (5, 4, 3), (6, 6, 0)])
def test_accumulated_gradients_are_those_of_the_mean_over_the_step(sizes):
    bench = Bench()
    expected = gradient(bench)
    assert torch.allclose(bench.moved(*sizes), expected, rtol=1e-12, atol=0)


def test_a_step_takes_its_own_micro_batches_and_no_more():
    bench = Bench()
    supply = iter([*bench.micro_batches(6, 6), *bench.micro_batches(12)])
    bench.step(0, supply)
    assert next(supply).num_samples == 12


def test_gradients_start_afresh_in_every_step():
    bench = Bench()
    bench.moved(12)
    expected = gradient(bench)
    assert torch.allclose(bench.moved(12), expected, rtol=1e-12, atol=0)


def test_the_loss_is_averaged_over_samples_and_a_stand_in_is_not_counted():
    bench = Bench()
    features, labels = bench.batch
    expected = cross_entropy(bench.model(features), labels).item()
    bench.moved(7, 5, 0)
    assert bench.meter.means()["train/loss"] == pytest.approx(expected, rel=1e-12)
    assert bench.meter.state()["train/loss"][1] == 12


def test_the_learning_rate_follows_the_schedule():
    bench = Bench(lr=0.5)
    for step in range(3):
        expected = gradient(bench) * 0.5 / (1 + step)
        assert torch.allclose(bench.moved(12, step=step), expected, rtol=1e-12, atol=0)
        assert bench.step.metrics == {"train/lr": 0.5 / (1 + step)}
    assert bench.asked == [0, 1, 2]


def test_clipping_bounds_the_norm_of_all_gradients_together():
    bench = Bench(clip=1e-3)
    expected = gradient(bench)
    moved = bench.moved(4, 4, 4)
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert torch.allclose(moved / moved.norm(), expected / expected.norm())
    loose = Bench(clip=1e3)
    assert torch.allclose(loose.moved(12), expected)


def test_bf16_is_the_forward_pass_alone():
    bench, plain = Bench(kind="bf16", dtype=torch.float32), Bench(dtype=torch.float32)
    features, labels = bench.batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(bench.model(features), labels)
    expected = torch.cat([item.flatten() for item in torch.autograd.grad(loss, list(bench.model.parameters()))])
    moved, exact = bench.moved(12), plain.moved(12)
    assert (bench.task.dtype, plain.task.dtype) == (torch.bfloat16, torch.float32)
    assert torch.allclose(moved, expected, rtol=1e-5, atol=1e-8)
    assert not torch.equal(moved, exact)
    assert bench.model.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_an_update_that_overflowed_is_skipped_by_the_schedule_and_the_average_too():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    bench = Bench(kind="bf16", dtype=torch.float32, scaler=scaler, ema=0.5)
    bench.task.factor = math.inf
    assert torch.equal(bench.moved(6, 6), torch.zeros(15))
    assert (bench.update.num_skipped, scaler.get_scale()) == (1, 2.0**9)
    average = torch.cat([value.flatten() for value in bench.ema.averages.values()])
    assert torch.equal(average, bench.weights())
    bench.task.factor = 1.0
    assert bench.moved(6, 6, step=1).norm() > 0
    assert bench.asked == [0, 0]
    assert bench.update.num_skipped == 1
    average = torch.cat([value.flatten() for value in bench.ema.averages.values()])
    assert not torch.equal(average, bench.weights())


def test_clipping_sees_gradients_without_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    bench = Bench(kind="bf16", dtype=torch.float32, scaler=scaler, clip=1e-3)
    assert bench.moved(12).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_the_gradients_norm_is_logged_as_it_was_before_clipping_and_without_updates_that_were_skipped():
    bench = Bench(clip=1e-3)
    expected = gradient(bench).norm().item()
    bench.moved(4, 4, 4)
    assert bench.meter.means()["train/grad_norm"] == pytest.approx(expected, rel=1e-6)
    scaled = Bench(dtype=torch.float32, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10), clip=1e-3)
    scaled.task.factor = math.inf
    scaled.moved(12)
    assert scaled.meter.names == ("train/loss",)


def test_clipping_by_value_bounds_every_element():
    bench = Bench(value=1e-3)
    assert bench.moved(12).abs().max().item() == pytest.approx(1e-3, rel=1e-6)
    assert "train/grad_norm" not in bench.meter.names


def test_what_is_logged_beside_the_means():
    assert Bench().step.metrics == {"train/lr": 1.0}
    scaled = Bench(dtype=torch.float32, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    scaled.task.factor = math.inf
    scaled.moved(12)
    assert scaled.step.metrics == {"train/lr": 1.0, "train/loss_scale": 2.0**9, "train/skipped_updates": 1}


@pytest.mark.parametrize("kind", ["fp16", "fp16_master"])
def test_fp16_has_a_scaler(kind):
    scaler = gradient_scaler(Precision(kind=kind, initial_loss_scale=8.0, loss_scale_growth_steps=5), CPU)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 5)


def test_the_scale_of_gradients_on_the_host_is_there_before_the_first_loss():
    scaler = gradient_scaler(Precision(kind="fp16", initial_loss_scale=8.0), torch.device("meta"), on_host=True)
    assert (scaler._scale.item(), scaler._scale.device) == (8.0, CPU)


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16", "bf16_pure"])
def test_what_has_the_range_of_fp32_has_no_scaler(kind):
    assert gradient_scaler(Precision(kind=kind), CPU) is None


class Odd(Classify):
    def __init__(self, make):
        self.make = make

    def loss(self, model, batch):
        return self.make(model(batch[0]))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda logits: logits.sum(1), r"its shape is \[12\]: reduce it with \.mean\(\)"),
        (lambda logits: logits.sum().reshape(1), r"its shape is \[1\]"),
        (lambda logits: None, "it returned a NoneType"),
        (lambda logits: logits.sum().item(), "it returned a float"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor(make, found):
    bench = Bench(task=Odd(make))
    with pytest.raises(TaskError, match=r"Odd\.loss must return a scalar.*" + found):
        bench.moved(12)


def test_what_the_task_raises_passes_through_as_it_is():
    def fail(logits):
        raise LookupError("the user's own")

    bench = Bench(task=Odd(fail))
    with pytest.raises(LookupError, match="the user's own") as caught:
        bench.moved(12)
    assert caught.value.__cause__ is None
    assert caught.traceback[-1].name == "fail"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda logits: {"kl": 1.0}, r"a mapping without 'loss', only 'kl': return the loss to optimise as 'loss'"),
        (lambda logits: {"loss": logits.sum(1)}, r"its shape is \[12\]"),
        (
            lambda logits: {"loss": logits.sum(), "kl": logits.sum(1)},
            r"a scalar as 'kl', found a tensor of shape \[12\]",
        ),
        (lambda logits: {"loss": logits.sum(), "kl": "high"}, r"a number or a scalar tensor as 'kl', found a str"),
        (lambda logits: {"loss": logits.sum(), "lr": 1.0}, r"logs 'lr', which hpctrain itself logs"),
        (lambda logits: {"loss": logits.sum(), 7: 1.0}, r"under the name 7: expected a string"),
    ],
)
def test_a_mapping_that_is_refused(make, problem):
    bench = Bench(task=Odd(make))
    before = bench.weights()
    with pytest.raises(TaskError, match=r"^Odd\.loss.*" + problem):
        bench.moved(12)
    assert torch.equal(bench.weights(), before)


def test_the_values_of_a_mapping_are_averaged_over_samples_and_only_the_loss_is_optimised():
    bench = Bench(task=Odd(lambda logits: {"loss": logits.square().mean(), "first": logits[0, 0], "four": 4}))
    plain = Bench(task=Odd(lambda logits: logits.square().mean()))
    firsts = [bench.model(bench.batch[0])[row, 0].item() for row in (0, 8)]
    assert torch.equal(bench.moved(8, 4, 0), plain.moved(8, 4, 0))
    means = bench.meter.means()
    assert means["train/first"] == pytest.approx((8 * firsts[0] + 4 * firsts[1]) / 12, rel=1e-12)
    assert means["train/four"] == 4.0
    assert means["train/loss"] == plain.meter.means()["train/loss"]


class Logging(Classify):
    def loss(self, model, batch):
        self.log.scalar("first", batch[0][0, 0])
        self.log.scalar("tokens", 2.0, count=torch.tensor(3))
        self.seen = self.log.will_record
        return super().loss(model, batch)


def test_what_a_task_logs_in_its_loss_is_averaged_likewise():
    bench = Bench(task=Logging())
    rows = bench.batch[0][:, 0].tolist()
    with bench.log.training():
        bench.moved(8, 4, 0)
    assert bench.meter.state()["train/first"] == (pytest.approx(8 * rows[0] + 4 * rows[8]), 12)
    assert bench.meter.state()["train/tokens"] == (12.0, 6.0)


class HookedLoss:
    """Logs in the backward pass of `loss`."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        loss.register_hook(lambda gradient: self.log.scalar("grad", len(batch[0]) * gradient))
        return loss


class Hooked(HookedLoss, Classify): ...


def test_what_a_hook_logs_in_the_backward_pass_counts_with_its_own_micro_batch():
    bench = Bench(task=Hooked())
    with bench.log.training():
        bench.moved(8, 4)
        assert bench.log.scalars == []
    # the gradient of a micro-batch's mean loss is its share of the samples
    assert bench.meter.state()["train/grad"] == (pytest.approx(8 * 8 * 8 / 12 + 4 * 4 * 4 / 12), 12)


def test_what_a_hook_logs_in_a_pass_that_belongs_to_no_step_is_discarded():
    bench = Bench(task=Hooked())
    with bench.log.training():
        bench.turn.try_out(next(bench.micro_batches(12)))
        assert bench.log.scalars == []


class Recomputed(Classify):
    def loss(self, model, batch):
        return checkpoint(self.logged, model, batch, use_reentrant=False)

    def logged(self, model, batch):
        self.log.scalar("first", batch[0][0, 0])
        return super().loss(model, batch)


def test_what_a_recomputed_layer_logs_is_averaged_likewise():
    bench, plain = Bench(task=Recomputed()), Bench(task=Logging())
    for each in (bench, plain):
        with each.log.training():
            each.moved(8, 4)
    assert bench.meter.means()["train/first"] == pytest.approx(plain.meter.means()["train/first"])


def test_a_name_that_is_returned_and_logged_in_the_backward_pass():
    def both(logits):
        logits.register_hook(lambda _: bench.task.log.scalar("kl", 1.0))
        return {"loss": logits.sum(), "kl": 2.0}

    bench = Bench(task=Odd(both))
    with bench.log.training(), pytest.raises(TaskError, match="both returns 'kl' and logs it"):
        bench.moved(12)


def test_whether_a_record_is_due():
    bench = Bench(task=Logging())
    due = []
    with bench.log.training():
        for step in range(10):
            bench.position.step = step
            bench.moved(12)
            due.append(bench.task.seen)
    assert due == [False, True] * 5
    with bench.log.training(), bench.log.evaluation_mode():
        assert bench.log.will_record


def test_passes_that_leave_no_trace_log_nothing():
    bench = Bench(task=Logging())
    with bench.log.training():
        bench.turn.compute_unlogged(bench.turn.module.loss_module, next(bench.micro_batches(12)))
    assert bench.meter.names == ("train/loss",)
    assert bench.log.scalars == []


def test_a_name_that_is_returned_and_logged():
    def both(logits):
        bench.task.log.scalar("kl", 1.0)
        return {"loss": logits.sum(), "kl": 2.0}

    bench = Bench(task=Odd(both))
    with bench.log.training(), pytest.raises(TaskError, match="both returns 'kl' and logs it"):
        bench.moved(12)


class Kept(Classify):
    """Keeps what its loss was called with, and whether a replica's forward pass was going on."""

    def loss(self, model, batch):
        self.model, self.inside = model, Surrounding.inside
        return super().loss(model, batch)


class Surrounding(LossModule):
    """Stands for DDP's wrapper."""

    inside = False

    def forward(self, compute):
        Surrounding.inside = True
        try:
            return super().forward(compute)
        finally:
            Surrounding.inside = False

    __call__ = forward


class Surrounded(Replica):
    def build_loss_module(self, model, before=None):
        return Surrounding(model)


def test_the_whole_loss_is_one_forward_pass_of_the_replica_and_gets_the_model_itself():
    bench = Bench(task=Kept(), replica_of=Surrounded)
    bench.moved(12)
    assert bench.task.model is bench.model
    assert bench.task.inside


class Duel(Task):
    """Two losses over parts of one model, which call the parts directly."""

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return (model.first(batch[0]) * model.second(batch[0])).square().mean()

    def other_loss(self, model, batch):
        self.required = [parameter.requires_grad for parameter in model.parameters()]
        return {"loss": (model.first(batch[0]) - model.second(batch[0])).square().mean(), "extra": 3.0}


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3, dtype=torch.float64)
        self.second = nn.Linear(4, 3, dtype=torch.float64)


def duel(model, task, meter, *, every=1, scaled=False):
    """A step of two turns: `loss` trains the first part, `other_loss` the second one, every so many steps."""
    turns = []
    log = AttachedLog("Duel", Position(), total_steps=10, every_steps=2)
    for name, method, part, pace in (("a", "loss", model.first, 1), ("b", "other_loss", model.second, every)):
        optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        rates = LearningRate(optimizer, lambda update: 1 / (1 + update))
        update = Update(optimizer, rates, name=name, scaler=scaler, every_steps=pace)
        loss = Loss(task, meter, log, precision=FORMATS["fp32"], device=CPU, function=method, name=name)
        module = TrainedModule(model, [(parameter, 0) for parameter in part.parameters()])
        joint = JointUpdate([update], meter, scaler=scaler)
        turns.append(Turn(loss, module, joint, checks(loss, module, joint), every_steps=pace))
    step = TrainStep(turns, LONE, None)
    step.build_replicas(0)
    return step


def test_turns_see_the_same_samples_one_after_the_other_and_train_their_own_parameters():
    bench, model, other, task = Bench(), Parts(), Parts(), Duel()
    meter = Meter(CPU)
    duel(model, task, meter)(0, bench.micro_batches(4, 8))
    for method, part in ((Duel.loss, other.first), (Duel.other_loss, other.second)):
        found = method(task, other, bench.batch)
        gradients = torch.autograd.grad(found["loss"] if isinstance(found, dict) else found, list(part.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(part.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.5)
    for expected, found in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.allclose(expected, found, rtol=1e-12, atol=0)
    assert meter.means().keys() == {"train/loss/a", "train/loss/b", "train/extra"}
    duel(model, task, meter)(0, bench.micro_batches(12))
    assert task.required == [False, False, True, True]


def test_a_turn_of_every_third_step_follows_its_schedule_by_the_steps_of_the_run():
    bench, model = Bench(), Parts()
    step, supply = duel(model, Duel(), Meter(CPU), every=3), [*bench.micro_batches(6, 6)]
    rates = []
    for number in range(6):
        before = model.second.weight.detach().clone()
        step(number, iter(supply))
        assert torch.equal(before, model.second.weight) is (number not in (2, 5))
        rates.append(step.metrics["train/lr/b"])
    assert rates == [0.5, 0.5, 0.5 / 3, 0.5 / 3, 0.5 / 3, 0.5 / 6]


class SameName(Duel):
    def loss(self, model, batch):
        return {"loss": super().loss(model, batch), "extra": 1.0}


class SameLogged(Duel):
    def loss(self, model, batch):
        self.log.scalar("extra", 1.0)
        return super().loss(model, batch)


@pytest.mark.parametrize("kind", [SameName, SameLogged])
def test_a_name_that_two_turns_log_is_refused(kind):
    bench, model, task = Bench(), Parts(), kind()
    step = duel(model, task, Meter(CPU))
    before = model.second.weight.detach().clone()
    log = step.turns[0].loss.task_log
    attach(task, log, Position())
    with (
        log.training(),
        pytest.raises(TaskError, match=r"other_loss logs 'extra', as Same.*\.loss does: choose another"),
    ):
        step(0, bench.micro_batches(4, 8))
    assert torch.equal(model.second.weight, before)


class HookedDuel(HookedLoss, Duel): ...


def test_a_hook_in_the_backward_pass_of_one_turn_logs_nothing_for_another():
    bench, task, meter = Bench(), HookedDuel(), Meter(CPU)
    step = duel(Parts(), task, meter)
    log = step.turns[0].loss.task_log
    attach(task, log, Position())
    with log.training():
        step(0, bench.micro_batches(8, 4))
    assert meter.state()["train/grad"] == (pytest.approx(8 * 8 * 8 / 12 + 4 * 4 * 4 / 12), 12)


class Popping(Duel):
    def loss(self, model, batch):
        features, _ = batch["inputs"].pop(), batch.pop("labels")
        return super().loss(model, (features,))

    def other_loss(self, model, batch):
        assert set(batch) == {"inputs", "labels"}
        return super().other_loss(model, batch["inputs"])


def test_what_one_turn_does_to_the_containers_of_a_batch_is_its_own():
    bench, model, plain = Bench(), Parts(), Parts()
    held = [
        micro_batch._replace(batch={"inputs": [micro_batch.batch[0]], "labels": micro_batch.batch[1]})
        for micro_batch in bench.micro_batches(4, 8)
    ]
    duel(model, Popping(), Meter(CPU))(0, iter(held))
    duel(plain, Duel(), Meter(CPU))(0, bench.micro_batches(4, 8))
    assert torch.equal(model.second.weight, plain.second.weight)


def test_the_total_loss_is_that_of_the_turns_of_every_step():
    means = {"train/loss/a": 1.0, "train/loss/b": 2.0}
    assert duel(Parts(), Duel(), Meter(CPU)).total_loss(means) == 3.0
    assert duel(Parts(), Duel(), Meter(CPU), every=3).total_loss(means) == 1.0


def test_a_loss_that_raises_no_longer_computes():
    def fail(logits):
        raise LookupError

    bench = Bench(task=Odd(fail))
    with pytest.raises(LookupError):
        bench.moved(12)
    assert not bench.turn.is_computing


def test_each_turn_has_a_loss_scale_and_skipped_updates_of_its_own():
    bench, model = Bench(), Parts()
    step = duel(model, Duel(), Meter(CPU), scaled=True)
    update = step.turns[1].update
    update.backward = lambda loss: torch.autograd.backward(update.scaler.scale(loss * math.inf))
    step(0, bench.micro_batches(12))
    found = step.metrics
    assert (found["train/loss_scale/a"], found["train/loss_scale/b"]) == (8.0, 4.0)
    assert (found["train/skipped_updates/a"], found["train/skipped_updates/b"]) == (0, 1)


def test_parameters_are_trained_from_their_step_on():
    bench = Bench()
    bias = bench.model.bias
    module = TrainedModule(bench.model, [(bench.model.weight, 0), (bias, 2)])
    loss, joint = bench.turn.loss, bench.turn.update
    turn = Turn(loss, module, joint, checks(loss, module, joint))
    step = TrainStep([turn], LONE, None)
    assert step.build_replicas(0) == [turn]
    moved = []
    for number in range(3):
        before = bias.detach().clone()
        step(number, bench.micro_batches(12))
        moved.append(not torch.equal(before, bias))
    assert moved == [False, False, True]
    assert step.build_replicas(2) == []


class Detached(Classify):
    def loss(self, model, batch):
        return super().loss(model, batch).detach()


def test_a_loss_that_depends_on_no_parameter_is_refused():
    bench = Bench(task=Detached())
    problem = r"^Detached\.loss depends on none of the parameters that it trains \(weight, bias\): "
    with pytest.raises(TaskError, match=problem):
        bench.moved(12)
    with pytest.raises(TaskError, match=problem):
        bench.turn.try_out(next(bench.micro_batches(12)))


class Half(Duel):
    def other_loss(self, model, batch):
        return (batch[0] @ model.second.weight.T).square().mean()


def test_parameters_without_a_gradient_are_reported_once(caplog):
    bench = Bench()
    step = duel(Parts(), Half(), Meter(CPU))
    step.prepare(0)
    step(0, bench.micro_batches(4, 8))
    step(1, bench.micro_batches(12))
    (message,) = caplog.messages
    problem = "Half.other_loss gave no gradient to second.bias, which optimizer.named.b trains for this loss: "
    assert message.startswith(problem)


class Aside(Classify):
    """Computes its loss with another model than the one that is trained."""

    def loss(self, model, batch):
        self.other = nn.Linear(4, 3, dtype=torch.float64)
        return super().loss(self.other, batch)


def test_a_loss_of_another_model_is_refused():
    bench = Bench(task=Aside())
    bench.step.prepare(0)
    with pytest.raises(TaskError, match=r"Aside\.loss gave no gradient to weight, bias, which it trains: compute the"):
        bench.moved(12)


class Untargeted(Classify):
    """Has nothing to learn from in the last micro-batch of step 1; `found` is its loss there."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return self.found(model) if self.position.step == 1 and len(batch[0]) == 4 else loss


def constant(_model):
    return torch.tensor(0.5, requires_grad=True)


@pytest.fixture
def shared():
    """Makes a bench whose gradients DDP averages, over one rank, with a task for which `found` is set."""

    def make(found, **parallel):
        task = Untargeted()
        task.found = found

        options = Parallel(**parallel)
        bench = Bench(task=task, replica_of=partial(DdpReplica, world=LONE, parallel=options), parallel=options)
        bench.step.prepare(0)
        return bench

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield make
    torch.distributed.destroy_process_group()


def two_steps(bench, *sizes):
    for step in range(2):
        bench.position.step = step
        moved = bench.moved(*sizes, step=step)
    return moved


@pytest.mark.parametrize("parallel", [{}, {"find_unused_parameters": True}])
def test_a_constant_loss_gives_gradients_of_zero_where_other_ranks_wait(shared, parallel):
    bench = shared(constant, **parallel)
    assert two_steps(bench, 4).tolist() == [0.0] * 15
    accumulated, alone = shared(constant, **parallel), Bench(task=Untargeted())
    alone.task.found = constant
    assert torch.allclose(two_steps(accumulated, 8, 4), two_steps(alone, 8, 4))


def weighted(bench, *weights):
    for weight, micro_batch in zip(weights, bench.micro_batches(*[4] * len(weights)), strict=True):
        yield micro_batch._replace(weight=weight, gradient_factor=float(any(weights)))


@pytest.mark.parametrize("averaged", [False, True])
def test_a_micro_batch_of_weight_0_leaves_parameters_alone_that_the_step_doesnt_use(shared, averaged, caplog):
    bench = shared(None, find_unused_parameters=True) if averaged else Bench(task=Untargeted())
    bench.step.prepare(0)
    bench.task.found, bench.position.step = lambda model: model.weight.sum(), 1
    bench.optimizer.param_groups[0]["weight_decay"] = 0.1
    before = bench.weights()
    bench.step(0, weighted(bench, 0, 0))
    assert torch.equal(bench.weights(), before)
    for weights in ((4, 0), (0, 4)):
        bench.step(1, weighted(bench, *weights))
    assert torch.equal(bench.model.bias, before[12:])
    assert (bench.model.weight.flatten() != before[:12]).all()
    (message,) = caplog.messages
    assert message.startswith("Untargeted.loss gave no gradient to bias, which it trains: ")


def test_a_constant_loss_of_the_first_step_is_refused_if_all_ranks_have_one(shared):
    bench = shared(constant)
    bench.position.step = 1
    with pytest.raises(TaskError, match=r"Untargeted.loss gave no gradient to weight, bias, which it trains: compute"):
        bench.moved(4, step=1)


@pytest.mark.parametrize(
    ("found", "parallel", "problem"),
    [
        (lambda model: constant(model) * 2, {}, "to weight, bias, which it trains; other ranks wait for it; where a"),
        (lambda model: constant(model) * 2, {"find_unused_parameters": True}, "to weight, bias, which it trains; othe"),
        (lambda model: model.bias.sum(), {}, "to weight, which it trains: freeze them, or set parallel.find_unused"),
        (lambda model: model.bias.sum(), {"find_unused_parameters": True}, None),
        (lambda model: model.bias.sum().detach(), {}, "depends on none of the parameters that it trains"),
    ],
)
@pytest.mark.parametrize("sizes", [(4,), (8, 4)])
def test_a_loss_without_gradients_for_which_other_ranks_wait_ends_the_run(shared, found, parallel, problem, sizes):
    bench = shared(found, **parallel)
    if problem is None:
        assert two_steps(bench, *sizes).abs().sum() > 0
        return
    with pytest.raises(TaskError, match=problem):
        two_steps(bench, *sizes)


class OtherReducer:
    """The reducer of a torch whose private check is another one, or that has none."""

    def __init__(self, *error):
        if error:
            self._check_reducer_finalized = self._raise
        self.error = error
        self.calls = 0

    def _raise(self):
        self.calls += 1
        raise self.error[0]


@pytest.mark.parametrize("error", [(), (TypeError("expected an argument"),), (RuntimeError("no such check"),)])
def test_a_torch_without_the_check_of_ddp_trains(shared, monkeypatch, error):
    bench = shared(constant)
    ddp, reducer = bench.turn.module.ddp, OtherReducer(*error)
    with monkeypatch.context() as patch:
        patch.setattr(ddp, "reducer", reducer)
        bench.turn.gradient_check.restart()
    assert two_steps(bench, 4).tolist() == [0.0] * 15
    assert reducer.calls == len(error)


class Stepper(Classify):
    def loss(self, model, batch):
        self.optimizer.step()
        return super().loss(model, batch)


def test_an_optimizer_that_steps_within_a_loss_is_refused():
    task = Stepper()
    bench = Bench(task=task)
    task.optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    with unknown_optimizers_refused(bench.step.turns):
        task.optimizer.step()
        with pytest.raises(TaskError, match=r"Stepper\.loss steps an optimizer of its own \(SGD\)"):
            bench.moved(12)
    bench.moved(12)
