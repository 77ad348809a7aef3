from __future__ import annotations

import math
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.errors import ConfigError, TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import Stop, StopKind, StopRequest
from hpctrain.tasks import Metric, PerSample, Task
from hpctrain.train.task_metrics import MetricState, exact_bytes
from hpctrain.train.training import build
from tests.unit.train.small_task import Small


@pytest.fixture
def agreement(lone_world):
    return Agreement(lone_world, StopRequest())


def mean_loss(training, model):
    features, labels = training.task.eval_dataset().tensors
    with torch.inference_mode():
        return cross_entropy(model.eval()(features), labels).item()


def test_the_means_are_over_all_held_out_samples(compose_small, lone_world, agreement):
    training = build(compose_small("+task.eval_samples=7"), lone_world)
    evaluated = training.evaluation(agreement)
    assert evaluated.stop is None
    assert training.evaluation.num_batches == 3
    assert training.module.training
    assert evaluated.means == {"eval/loss": pytest.approx(mean_loss(training, training.module))}


def test_averaged_weights_are_evaluated_if_configured(compose_small, lone_world, agreement):
    training = build(compose_small("trainer.ema_decay=0.5", "trainer.eval_ema=true"), lone_world)
    before = mean_loss(training, training.module)
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.add_(1.0)
    training.module.train()
    assert training.evaluation(agreement).means["eval/loss"] == pytest.approx(before)


class LastBias(Metric):
    """Keeps a bias of the model itself."""

    def __init__(self):
        self.add_state("bias", torch.zeros(3), reduce="max")

    def update(self, model):
        self.bias = model[2].bias.detach()

    def compute(self):
        return self.bias.mean()


def test_a_metric_that_keeps_a_weight_has_the_averaged_one(compose_small, lone_world, agreement, monkeypatch):
    metric = LastBias()
    monkeypatch.setattr(Small, "build_metrics", lambda _: {"bias": metric})
    evaluate = Small.evaluate
    monkeypatch.setattr(Small, "evaluate", lambda *given: (metric.update(given[1]), evaluate(*given))[1])
    training = build(compose_small("trainer.ema_decay=0.5"), lone_world)
    before = training.module[2].bias.mean().item()
    with torch.no_grad():
        training.module[2].bias.add_(1.0)
    assert training.evaluation(agreement).means["eval/bias"] == pytest.approx(before)


def test_a_part_that_a_task_keeps_in_evaluation_mode_stays_in_it(compose_small, lone_world, agreement):
    training = build(compose_small(), lone_world)
    first, *_ = training.module.children()
    first.eval()
    training.evaluation(agreement)
    assert training.module.training
    assert not first.training


def test_nothing_is_evaluated_where_no_samples_are_held_out(compose_small, lone_world):
    assert build(compose_small("+task.eval_samples=0"), lone_world).evaluation is None


def test_a_stop_abandons_it_and_leaves_the_random_state_and_the_tasks_state_alone(
    compose_small, lone_world, monkeypatch
):
    monkeypatch.setattr("tests.unit.train.small_task.Small.state_dict", lambda task: task.calls, raising=False)
    monkeypatch.setattr(
        "tests.unit.train.small_task.Small.load_state_dict", lambda task, state: task.calls.update(state), raising=False
    )
    handler = signal.getsignal(signal.SIGUSR1)
    request = StopRequest()
    request.install()
    try:
        training = build(compose_small("+task.signal_in=evaluate", "+task.signal_at=2"), lone_world)
        before = torch.get_rng_state()
        evaluated = training.evaluation(Agreement(lone_world, request))
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert evaluated.stop == Stop(StopKind.SIGNAL, signal.SIGUSR1)
    assert not evaluated.means
    assert torch.equal(torch.get_rng_state(), before)
    assert training.task.calls == {"loss": 0, "evaluate": 0}


def test_a_model_may_keep_a_tensor_of_an_evaluation_for_its_training(compose_small, lone_world, agreement, monkeypatch):
    class Scaled(nn.Linear):
        table = None

        def forward(self, features):
            if self.table is None:
                self.table = torch.ones_like(features[0])
            return super().forward(features * self.table)

    monkeypatch.setattr("tests.unit.train.small_task.Small.build_model", lambda task: Scaled(4, 3))
    training = build(compose_small(), lone_world)
    training.evaluation(agreement)
    training.step(0, iter(training.data.loader(0)))


class Count(Metric):
    def __init__(self):
        self.add_state("count", torch.tensor(0), reduce="sum")

    def update(self, labels):
        self.count += len(labels)

    def compute(self):
        return self.count


@pytest.fixture
def scoring(compose_small, lone_world, monkeypatch):
    """Makes the training of a task that counts, and returns a value per sample."""

    def metrics(task):
        task.counts = Count()
        return {"count": task.counts}

    def evaluate(task, model, batch):
        task._called("evaluate")
        task.counts.update(batch[1])
        return {"features": PerSample(batch[0])}

    def compute_metrics(task, samples):
        assert not torch.is_grad_enabled()
        return {"same": torch.equal(samples["features"], task.eval_dataset().tensors[0])}

    def make(*words, **methods):
        for name, method in {
            "build_metrics": metrics,
            "evaluate": evaluate,
            "compute_metrics": compute_metrics,
            **methods,
        }.items():
            monkeypatch.setattr(Small, name, method)
        return build(compose_small(*words), lone_world)

    return make


def test_metric_objects_and_scores_are_of_all_samples_also_after_a_trial_and_an_abandoned_evaluation(
    scoring, agreement, lone_world
):
    training = scoring("+task.eval_samples=7", "+task.signal_in=evaluate", "+task.signal_at=3")
    assert training.evaluation.try_out(agreement, 1).means == {"eval/count": 3, "eval/same": 0}
    request = StopRequest()
    handler = signal.getsignal(signal.SIGUSR1)
    request.install()
    try:
        assert training.evaluation(Agreement(lone_world, request)).stop is not None
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert training.task.counts.count == 0
    assert training.evaluation(agreement).means == {"eval/count": 7, "eval/same": 1}


def test_a_value_per_sample_without_a_score_is_refused_before_the_first_step(scoring, agreement):
    training = scoring(compute_metrics=Task.compute_metrics)
    with pytest.raises(TaskError, match=r"^Small\.evaluate returns a PerSample: define Small\.compute_metrics"):
        training.evaluation.try_out(agreement, 1)


def test_two_metrics_by_one_name_are_refused(scoring, agreement):
    training = scoring(compute_metrics=lambda task, samples: {"count": 1})
    with pytest.raises(TaskError, match=r"^Small has two metrics by the name 'count': rename one of them"):
        training.evaluation(agreement)


def test_more_than_may_be_gathered_is_refused_in_the_trial_of_all_samples(scoring, agreement):
    def evaluate(task, model, batch):
        task.counts.update(batch[1])
        return {"features": PerSample(torch.zeros(len(batch[1]), 2**16))}

    training = scoring("+task.eval_samples=9", "trainer.max_gathered_mb=2", evaluate=evaluate)
    expected = "max_gathered_mb=2: rank zero would get 3 MB, 262144 bytes for each of 9 samples; set it to 3, or keep"
    with pytest.raises(ConfigError, match=expected):
        training.evaluation.try_out(agreement, 1)


class Kept(Metric):
    """Keeps the bytes of each sample."""

    def __init__(self, per_sample):
        self.per_sample = per_sample
        self.add_state("shown", reduce="cat")

    def update(self, labels):
        self.shown.append(torch.zeros(len(labels), self.per_sample, dtype=torch.uint8))

    def compute(self):
        return sum(map(len, self.shown))


def keeping(metric):
    """The methods of a task that only updates a metric."""

    def metrics(task):
        task.kept = metric
        return {"kept": metric}

    def evaluate(task, model, batch):
        task._called("evaluate")
        task.kept.update(batch[1])
        return {"loss": (torch.tensor(0.0), len(batch[1]))}

    return {"build_metrics": metrics, "evaluate": evaluate, "compute_metrics": Task.compute_metrics}


def test_an_evaluation_ends_as_soon_as_metric_objects_keep_too_much(scoring, agreement):
    training = scoring("+task.eval_samples=300", "trainer.max_gathered_mb=2", **keeping(Kept(2**18)))
    for _ in range(2):  # the second one counts afresh
        before = training.task.calls["evaluate"]
        with pytest.raises(ConfigError, match=r"rank zero would get at least .* MB, 262144 bytes for each of"):
            training.evaluation(agreement)
        # three samples per batch; the ranks agree some batches later
        assert training.task.calls["evaluate"] - before < 20


def test_what_metric_objects_keep_within_the_limit_ends_nothing(scoring, agreement):
    training = scoring("+task.eval_samples=15", "trainer.max_gathered_mb=2", **keeping(Kept(2**17)))
    assert training.evaluation(agreement).means["eval/kept"] == 15
    assert training.evaluation(agreement).means["eval/kept"] == 15


@pytest.mark.parametrize(
    ("default", "value", "found"),
    [
        (None, [torch.zeros(3), torch.zeros(2)], (20, 0)),
        (torch.zeros(4), torch.ones(4), (0, 16)),
        # concatenated by the update itself
        (torch.zeros(0), torch.ones(5), (20, 0)),
    ],
)
def test_states_of_another_size_than_their_default_grow(default, value, found):
    state = MetricState(SimpleNamespace(kept=value), "kept", default, "cat" if default is None else "stack")
    assert exact_bytes([state, state]) == found


def test_a_state_that_does_not_grow_counts_once(scoring, agreement):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Table(torchmetrics.Metric):
        """A table that no sum, minimum or maximum reduces."""

        def __init__(self):
            super().__init__()
            self.add_state("table", torch.zeros(2**19), dist_reduce_fx=lambda stacked: stacked.mean(0))

        def update(self, labels):
            self.table += len(labels)

        def compute(self):
            return self.table[0]

    training = scoring("+task.eval_samples=30", "trainer.max_gathered_mb=3", **keeping(Table()))
    assert training.evaluation.try_out(agreement, 1).means["eval/kept"] == 3
    assert training.evaluation(agreement).means["eval/kept"] == 30
    training = scoring("+task.eval_samples=30", "trainer.max_gathered_mb=1", **keeping(Table()))
    expected = "rank zero would get 2 MB, 0 bytes for each of 30 samples, and 2097152 bytes of states that do not grow"
    with pytest.raises(ConfigError, match=expected):
        training.evaluation.try_out(agreement, 1)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_logged_mean_over_nothing_is_left_out_on_every_device(scoring, agreement, monkeypatch, on_device):
    def evaluate(task, model, batch):
        task.log.scalar("masked", torch.tensor(float("nan")), count=torch.tensor(0))
        return {"loss": (1.0, len(batch[0])), "none": (0.0, 0)}

    # as on a GPU
    meter = partial(Meter, sums_on_device=on_device)
    monkeypatch.setattr("hpctrain.train.task_log.Meter", meter)
    training = scoring(evaluate=evaluate)
    with training.task_log.training(None):
        means = training.evaluation(agreement).means
    assert means.keys() == {"eval/loss", "eval/none", "eval/count"}
    assert math.isnan(means["eval/none"])
