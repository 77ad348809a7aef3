import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpctrain.config.schedule import Plateau, Schedule, schedule_of
from hpctrain.errors import ConfigError
from hpctrain.train.build_learning_rate import Span, TorchLearningRate, build_learning_rate
from hpctrain.train.learning_rate import LearningRate, PlateauLearningRate

SCHEDULERS = "torch.optim.lr_scheduler"


def squared(total_steps, power=2.0):
    return lambda step: (1 - step / total_steps) ** power


def by_epoch(steps_per_epoch):
    return lambda step: 0.5 ** (step // steps_per_epoch)


def words():
    return lambda step: "half" if step else 1.0


def below_zero():
    return lambda step: (8 - step) / 10


def rounded():
    return lambda step: -1e-17 if step == 9 else 1.0


def of_another(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], lr=1.0))


def nothing():
    return None


def in_turn(optimizer):
    parts = torch.optim.lr_scheduler
    rise, fall = parts.LinearLR(optimizer, 0.1, total_iters=3), parts.ExponentialLR(optimizer, 0.5)
    return parts.SequentialLR(optimizer, [rise, fall], [3])


class Training:
    """Updates one weight as `Update` does, with two groups of parameters."""

    def __init__(self, schedule, span=Span(total_steps=10, steps_per_epoch=5), lr=0.1):  # noqa: B008
        self.weights = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
        groups = [{"params": [self.weights[0]]}, {"params": [self.weights[1]], "lr": lr / 10}]
        self.optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        self.rate = build_learning_rate("schedule", schedule, self.optimizer, span)
        self.step = 0

    def run(self, steps):
        rates = []
        for _ in range(steps):
            self.rate.begin(self.step)
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            for weight in self.weights:
                weight.grad = weight.detach() * 0.3
            self.optimizer.step()
            self.rate.after_update()
            self.step += 1
        return rates

    def checkpoint(self):
        return copy.deepcopy((self.weights, self.optimizer.state_dict(), self.rate.state_dict(), self.step))

    def resume(self, checkpoint):
        weights, optimizer, rate, self.step = copy.deepcopy(checkpoint)
        for mine, saved in zip(self.weights, weights, strict=True):
            mine.data = saved.detach()
        self.optimizer.load_state_dict(optimizer)
        self.rate.load_state_dict(rate)


def custom(name, **options):
    return {"_target_": f"{SCHEDULERS}.{name}", **options}


def test_a_factory_gets_the_length_of_the_run():
    rates = Training({"_target_": f"{__name__}.squared"}).run(10)
    assert [lr for lr, _ in rates] == [0.1 * (1 - step / 10) ** 2 for step in range(10)]
    rates = Training({"_target_": f"{__name__}.squared", "total_steps": 20, "power": 1.0}).run(5)
    assert [lr for lr, _ in rates] == [0.1 * (1 - step / 20) for step in range(5)]


@pytest.mark.parametrize(
    ("schedule", "key"),
    [
        (Schedule(warmup_epochs=1), "warmup_epochs"),
        (Plateau(warmup_epochs=1), "warmup_epochs"),
        (Schedule(kind="step", drop_at_epochs=[1.0]), "drop_at_epochs"),
        (Schedule(kind="wsd", decay_epochs=1), "decay_epochs"),
        (custom("OneCycleLR", max_lr=0.1, epochs=2), "epochs"),
        ({"_target_": f"{__name__}.by_epoch"}, "_target_"),
    ],
)
def test_lengths_in_epochs_are_refused_without_a_length_of_the_data(schedule, key):
    # an epoch would be the whole run, and a resume with another max_steps would change what is past
    with pytest.raises(
        ConfigError, match=rf"^schedule\.{key}=.* counts in epochs, but the training data have no length"
    ):
        Training(schedule, Span(total_steps=10, steps_per_epoch=None))


def test_schedules_without_epochs_need_no_length_of_the_data():
    span = Span(total_steps=10, steps_per_epoch=None)
    Training(Schedule(kind="cosine", warmup_steps=2), span)
    Training(custom("OneCycleLR", max_lr=[0.1, 0.01]), span)


SCHEDULES = {
    "step": custom("StepLR", step_size=3, gamma=0.5),
    "one_cycle": custom("OneCycleLR", max_lr=[0.3, 0.03]),
    "cyclic": custom("CyclicLR", base_lr=[0.01, 0.001], max_lr=[0.1, 0.01], step_size_up=3),
    "restarts": custom("CosineAnnealingWarmRestarts", T_0=2, T_mult=2),
    "cosine": custom("CosineAnnealingLR", T_max=4),
    "several": custom("MultiStepLR", milestones=[2, 5]),
    "in_turn": {"_target_": f"{__name__}.in_turn"},
}


def test_a_rate_that_is_a_tensor_is_read_before_a_scheduler_of_torch_changes_it_in_place():
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)], lr=torch.tensor(1e-2))
    rate = build_learning_rate("schedule", custom("LinearLR", start_factor=0.1), optimizer, Span(10, 5))
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-3)
    assert rate.state_dict()["base_rates"] == [pytest.approx(1e-2)]
    assert not rate.overwrites


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_scheduler_of_torch_continues_as_if_it_hadnt_stopped(name, stop):
    straight = Training(SCHEDULES[name])
    rates = straight.run(10)
    assert rates[0] != rates[-1]
    first, second = Training(SCHEDULES[name]), Training(SCHEDULES[name])
    assert first.run(stop) == rates[:stop]
    second.resume(first.checkpoint())
    assert second.run(10 - stop) == rates[stop:]
    for mine, theirs in zip(second.weights, straight.weights, strict=True):
        assert torch.equal(mine, theirs)


def test_one_cycle_moves_the_momentum_too():
    training = Training(SCHEDULES["one_cycle"])
    training.run(3)
    assert training.optimizer.param_groups[0]["momentum"] != 0.9


def test_a_longer_run_stretches_a_scheduler():
    first = Training(SCHEDULES["one_cycle"])
    first.run(10)
    longer = Span(total_steps=20, steps_per_epoch=5)
    second = Training(SCHEDULES["one_cycle"], longer)
    second.resume(first.checkpoint())
    assert second.run(10) == Training(SCHEDULES["one_cycle"], longer).run(20)[10:]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one_cycle", {"max_lr": [0.6, 0.06]}),
        ("one_cycle", {"div_factor": 5.0, "max_momentum": 0.8}),
        ("cyclic", {"max_lr": [0.4, 0.04], "base_momentum": 0.5}),
        ("cyclic", {"base_lr": [0.02, 0.002]}),
    ],
)
def test_changed_options_of_a_scheduler_count_from_the_next_step_on(name, options):
    changed = {**SCHEDULES[name], **options}
    first, second, straight = Training(SCHEDULES[name]), Training(changed), Training(changed)
    first.run(4)
    second.resume(first.checkpoint())
    straight.run(4)
    for _ in range(5):
        assert second.run(1) == straight.run(1)
        for mine, theirs in zip(second.optimizer.param_groups, straight.optimizer.param_groups, strict=True):
            assert mine["momentum"] == theirs["momentum"]


def test_a_run_beyond_a_shortened_curve_can_be_restored():
    first = Training(SCHEDULES["one_cycle"])
    first.run(9)
    Training(SCHEDULES["one_cycle"], Span(total_steps=5, steps_per_epoch=5)).resume(first.checkpoint())


class Counting(LRScheduler):
    """Keeps its count in the groups."""

    def __init__(self, optimizer, pace=2):
        for group in optimizer.param_groups:
            group["seen"] = 0
            group["pace"] = pace
        super().__init__(optimizer)

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["seen"] += group["pace"]
        return [group["lr"] / group["seen"] for group in self.optimizer.param_groups]


def test_what_a_scheduler_counts_in_the_groups_is_restored():
    node = {"_target_": f"{__name__}.Counting"}
    first, second, straight = Training(node), Training(node), Training(node)
    first.run(4)
    second.resume(first.checkpoint())
    assert second.run(4) == straight.run(8)[4:]


@pytest.mark.parametrize(
    "node",
    [custom("OneCycleLR", max_lr=0.3), custom("CyclicLR", base_lr=0.1, max_lr=0.3)],
)
def test_a_scheduler_that_sets_one_rate_for_all_groups_is_refused_if_they_differ(node):
    with pytest.raises(ConfigError, match=r"^schedule\._target_=.*sets one rate for all groups.*lists.*one_cycle"):
        Training(node)


def test_the_rate_that_is_logged_is_that_of_the_scheduler():
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    node = custom("OneCycleLR", max_lr=0.3)
    rate = build_learning_rate("schedule", node, optimizer, Span(10, 5), base_lr=0.1)
    logged = []
    for step in range(10):
        rate.begin(step)
        logged.append(rate.current)
        assert rate.current == optimizer.param_groups[0]["lr"]
        optimizer.step()
        rate.after_update()
    assert max(logged) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("options", [{}, {"epochs": 5}])
def test_the_lengths_of_a_scheduler_count_the_updates_of_its_optimizer(options):
    span = Span(total_steps=20, steps_per_epoch=4, every_steps=4)
    training = Training({**SCHEDULES["one_cycle"], **options}, span)
    rates = training.run(5)
    assert rates[-1][0] < rates[0][0] < rates[2][0]
    # a function of the step gets the steps of the run
    assert Training({"_target_": f"{__name__}.squared"}, span).run(1)[0][0] == 0.1
    assert Training({"_target_": f"{__name__}.squared"}, span).rate._factor(10) == 0.25


def test_a_changed_base_rate_scales_what_a_scheduler_has_reached():
    first, second = Training(SCHEDULES["step"]), Training(SCHEDULES["step"], lr=0.2)
    first.run(4)
    second.rate.load_state_dict(first.rate.state_dict())
    assert second.run(1)[0] == pytest.approx([0.1, 0.01])


def test_another_scheduler_starts_anew(caplog):
    first, second = Training(SCHEDULES["step"]), Training(SCHEDULES["several"])
    first.run(4)
    second.rate.load_state_dict(first.rate.state_dict())
    assert "MultiStepLR" in caplog.text
    assert second.run(1)[0] == pytest.approx([0.1, 0.01])


def plateaued(**options):
    schedule = Plateau(**options)
    return Training(schedule, Span(10, 5, "loss", "min"))


def test_a_plateau_lowers_the_rate_as_torch_does():
    losses = [3.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, math.nan, 1.0, 1.0, 0.99995, 1.0, 0.5, *[0.5] * 9]
    options = {"factor": 0.5, "patience": 1, "threshold": 0.01, "cooldown": 1}
    training = plateaued(**options, min_factor=0.1)
    theirs = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    scheduler = ReduceLROnPlateau(theirs, **options, min_lr=0.01)
    for step, loss in enumerate(losses):
        assert training.run(1)[0][0] == pytest.approx(theirs.param_groups[0]["lr"])
        training.rate.after_evaluation(step + 1, {"eval/loss": loss})
        scheduler.step(loss)
    assert training.run(1)[0][0] == pytest.approx(0.01)


def test_a_plateau_follows_a_metric_that_grows():
    training = Training(Plateau(patience=0), Span(10, 5, "accuracy", "max"))
    for value in (0.1, 0.2):
        training.rate.after_evaluation(1, {"eval/accuracy": value, "eval/loss": 1.0})
    assert training.run(1)[0][0] == 0.1
    training.rate.after_evaluation(2, {"eval/accuracy": 0.2})
    assert training.run(1)[0][0] == pytest.approx(0.01)


def test_a_plateau_doesnt_count_within_the_warm_up():
    training = plateaued(patience=0, warmup_steps=3)
    for step in range(4):
        assert training.run(1)[0][0] == pytest.approx(0.1 * (step + 1) / 4)
        training.rate.after_evaluation(step + 1, {"eval/loss": 1.0 + (step == 3)})
    assert training.run(1)[0][0] == pytest.approx(0.01)


def test_a_plateau_is_restored_unless_the_metric_is_another():
    first, second = plateaued(patience=1), plateaued(patience=1)
    first.run(3)
    for _ in range(4):
        first.rate.after_evaluation(3, {"eval/loss": 1.0})
    second.rate.load_state_dict(first.rate.state_dict())
    assert second.rate.state_dict() == first.rate.state_dict()
    other = Training(Plateau(), Span(10, 5, "accuracy", "max"))
    other.rate.load_state_dict(first.rate.state_dict())
    assert other.rate.state_dict()["best"] == math.inf
    assert other.run(1)[0][0] == pytest.approx(0.01)


def test_states_of_other_schedules_are_ignored():
    plateau, function = plateaued(), Training(Schedule())
    plateau.rate.load_state_dict(function.rate.state_dict())
    function.rate.load_state_dict(plateau.rate.state_dict())
    assert function.rate.state_dict() == {}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"_target_": f"{__name__}.nothing"}, "made a NoneType, expected a function of the step"),
        ({"_target_": f"{__name__}.of_another"}, "made a scheduler of another optimizer"),
        ({"_target_": f"{SCHEDULERS}.ReduceLROnPlateau"}, "use schedule=plateau"),
        ({"_target_": f"{__name__}.unknown"}, "has no unknown"),
    ],
)
def test_what_is_not_a_schedule_is_refused(node, said):
    with pytest.raises(ConfigError, match=r"^critic\.schedule\._target_=") as caught:
        build_learning_rate("critic.schedule", node, torch.optim.SGD([torch.ones(1)], lr=1.0), Span(10, 5))
    assert said in str(caught.value)


def test_a_factor_that_is_not_a_number_is_refused():
    with pytest.raises(ConfigError, match=r"^schedule\._target_=.*returned a str for step 1"):
        Training({"_target_": f"{__name__}.words"})
    with pytest.raises(ConfigError, match=r"returned -0\.1 for step 9, expected a finite number of at least 0"):
        Training({"_target_": f"{__name__}.below_zero"})


def test_a_factor_that_rounding_takes_below_zero_counts_as_zero():
    node = {"_target_": f"{__name__}.rounded"}
    rate = build_learning_rate("schedule", node, torch.optim.SGD([torch.ones(1)], lr=1.0), Span(10, 5))
    rate.begin(9)
    assert rate.current == 0.0


def test_a_curve_of_torch_that_ends_before_the_run_is_refused():
    node = {"_target_": f"{SCHEDULERS}.OneCycleLR", "max_lr": [0.1, 0.01], "total_steps": 9}
    with pytest.raises(ConfigError, match=r"^schedule\._target_=.*ends after 9 updates, but the run has 10; leave out"):
        Training(node)
    Training({**node, "total_steps": 10}).run(10)


def test_a_plateau_names_its_own_key():
    key = "optimizer.named.critic.schedule"
    rate = build_learning_rate(key, Plateau(), torch.optim.SGD([torch.ones(1)], lr=1.0), Span(10, 5))
    with pytest.raises(ConfigError, match=r"^optimizer\.named\.critic\.schedule\.kind=plateau: needs the metric loss"):
        rate.after_evaluation(1, {"eval/accuracy": 1.0})


def test_a_plateau_needs_a_metric_with_a_mode():
    with pytest.raises(ConfigError, match=r"checkpoint\.metric_mode"):
        Training(Plateau(), Span(10, 5, "bleu", None))
    with pytest.raises(ConfigError, match="needs the metric loss, but the evaluation returns accuracy"):
        plateaued().rate.after_evaluation(1, {"eval/accuracy": 1.0})


def test_only_some_schedules_follow_updates_and_evaluations():
    assert TorchLearningRate.after_update is not LearningRate.after_update
    assert PlateauLearningRate.after_update is LearningRate.after_update
    assert (plateaued().rate.metric, LearningRate.metric) == ("loss", None)


def test_the_keys_of_a_nested_schedule_are_checked():
    key = "optimizer.named.critic.schedule"
    assert schedule_of(key, {"kind": "plateau", "patience": 3}) == Plateau(patience=3)
    assert schedule_of(key, {"kind": "linear"}) == Schedule(kind="linear")
    assert schedule_of(key, {"_target_": "a.b", "c": 1}) == {"_target_": "a.b", "c": 1}
    with pytest.raises(ConfigError, match=rf"^{key}\.warmup_stepz=1: .*{key}\.warmup_steps"):
        schedule_of(key, {"kind": "linear", "warmup_stepz": 1})
    with pytest.raises(ConfigError, match=rf"^{key}\.kind=sine"):
        schedule_of(key, {"kind": "sine"})
