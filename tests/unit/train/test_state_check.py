import collections

import pytest
import torch

from hpctrain.errors import TaskError
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.optimizers import StateCheck
from hpctrain.train.update import Update


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute; a constant that the first step sets is no state."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        self.at_first = 3.0
        return super().step(closure)


class Summing(torch.optim.SGD):
    """Sums in a tensor."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.sum = torch.zeros(())

    def step(self, closure=None):
        self.sum += 1
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Holds another optimizer, as Lookahead does."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.inside = torch.optim.Adam(self.param_groups, lr=lr)

    def step(self, closure=None):
        return self.inside.step()


class Complete(Counting):
    """Saves what it counts."""

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}


class Queueing(torch.optim.SGD):
    """Has a state that no checkpoint can hold."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["recent"] = collections.deque([1])
        return super().step(closure)


class Random(LearningRate):
    """A schedule with a state that no checkpoint can hold."""

    def state_dict(self):
        return {"generator": torch.Generator()}


def trained(kind, steps=3, rate=LearningRate, name=""):
    weight = torch.ones(2, requires_grad=True)
    optimizer = kind([weight], lr=0.1)
    schedule = rate(optimizer, lambda _: 1.0)
    check = StateCheck(optimizer, schedule, name=name, warns=True)
    update = Update(optimizer, schedule, name=name, state_check=check)
    for _ in range(steps):
        weight.grad = torch.ones(2)
        update()
    return update


@pytest.mark.parametrize(("kind", "attribute"), [(Counting, "count"), (Summing, "sum"), (Around, "inside")])
def test_attributes_that_updates_change_and_no_checkpoint_has_are_named(kind, attribute, caplog):
    update = trained(kind, name="critic")
    (message,) = caplog.messages
    assert message.startswith(
        f"optimizer.named.critic: updates change {attribute} of {kind.__name__}, which checkpoints"
    )
    assert update.state_check is None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Complete])
def test_a_state_that_checkpoints_have_is_not_mentioned(kind, caplog):
    trained(kind)
    assert caplog.messages == []


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_first_update():
    with pytest.raises(
        TaskError, match=r"^optimizer: Queueing\.state_dict\(\)\['state'\]\[0\]\['recent'\] is a .*deque; "
    ):
        trained(Queueing, steps=1)
    with pytest.raises(TaskError, match=r"^optimizer: the state of its schedule\['generator'\] is a torch.*Generator"):
        trained(torch.optim.SGD, steps=1, rate=Random)
