"""Reinforcement learning: an actor and a critic with an optimizer each, and a replay buffer that survives."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.data import TensorBatches
from hpctrain.tasks import Sums, Task

EPISODE = 200
"""Steps after which a pendulum starts anew."""


class ActorCritic(nn.Module):
    """The torque for an observation, and the value of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Tanh()
        )
        self.critic = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def value(self, seen: Tensor, action: Tensor) -> Tensor:
        return self.critic(torch.cat([seen, action], dim=1))


class Pendulums(Task):
    """Swing pendulums up and hold them there, learning from replayed transitions (DDPG: Lillicrap et al., 2016).

    Each rank has its own pendulums and its own buffer. A sample of the data set is one replayed transition: which one
    is drawn in the loss, from the rank's random stream, which checkpoints contain.

    Args:
        num_pendulums: of each rank; all of them move once per step.
        capacity: transitions in a rank's buffer. Rank zero writes the buffers of all ranks into each checkpoint.
        width: of the networks.
        discount: of rewards one step later.
        tau: share of the new weights in the target networks, per step.
        noise: deviation of what is added to the actor's torques.
    """

    metric, metric_mode = "return", "max"

    def __init__(
        self,
        num_pendulums: int = 16,
        capacity: int = 20_000,
        width: int = 128,
        discount: float = 0.98,
        tau: float = 0.01,
        noise: float = 0.2,
    ) -> None:
        self.width, self.discount, self.tau, self.noise = width, discount, tau, noise
        self.buffer = torch.zeros(capacity, 8)  # what was seen, the torque, the reward, and what was seen then
        self.stored = 0
        self.pendulums = torch.zeros(num_pendulums, 2)  # angle from upright, and angular velocity
        self.age = torch.full((num_pendulums,), EPISODE)

    def build_model(self) -> nn.Module:
        model = ActorCritic(self.width)
        self.target = copy.deepcopy(model).requires_grad_(False)
        return model

    def state_dict(self) -> dict[str, Any]:
        """All that the task changes during training."""
        own = {"buffer": self.buffer, "stored": self.stored, "pendulums": self.pendulums, "age": self.age}
        return {**own, "target": self.target.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer, self.stored = state["buffer"], state["stored"]
        self.pendulums, self.age = state["pendulums"], state["age"]
        self.target.load_state_dict(state["target"])

    def train_dataset(self) -> TensorBatches:
        return TensorBatches(torch.arange(64_000))

    def eval_dataset(self) -> TensorBatches:
        angles = torch.linspace(-torch.pi, torch.pi, 64)
        return TensorBatches(torch.stack([angles, torch.zeros(64)], dim=1))

    def critic_loss(self, model: Any, batch: tuple[Tensor]) -> Tensor:
        """The first turn of a step: the pendulums move, and the critic learns."""
        self.to(batch[0].device)
        self.move_pendulums(model)
        with torch.no_grad():
            for target, weight in zip(self.target.parameters(), model.parameters(), strict=True):
                target.lerp_(weight, self.tau)
        seen, action, reward, then = self.replayed(len(batch[0]))
        expected = reward + self.discount * self.target.value(then, self.target.actor(then))
        return F.mse_loss(model.value(seen, action), expected)

    def loss(self, model: Any, batch: tuple[Tensor]) -> Tensor:
        """The second turn: the actor learns what the critic values."""
        seen, _, _, _ = self.replayed(len(batch[0]))
        return -model.value(seen, model.actor(seen)).mean()

    @torch.no_grad()
    def move_pendulums(self, model: Any) -> None:
        over = self.age >= EPISODE
        anew = (2 * torch.rand_like(self.pendulums) - 1) * torch.tensor([torch.pi, 1.0], device=over.device)
        self.pendulums = torch.where(over[:, None], anew, self.pendulums)
        self.age = torch.where(over, 1, self.age + 1)
        seen = observed(self.pendulums)
        action = (model.actor(seen) + self.noise * torch.randn_like(seen[:, :1])).clamp(-1, 1)
        self.pendulums, reward = moved(self.pendulums, action)
        rows = torch.arange(self.stored, self.stored + len(seen), device=over.device) % len(self.buffer)
        self.buffer[rows] = torch.cat([seen, action, reward, observed(self.pendulums)], dim=1)
        self.stored += len(seen)

    def replayed(self, count: int) -> tuple[Tensor, ...]:
        rows = torch.randint(min(self.stored, len(self.buffer)), (count,), device=self.buffer.device)
        return self.buffer[rows].split([3, 1, 1, 3], dim=1)

    def evaluate(self, model: Any, batch: tuple[Tensor]) -> Sums:
        pendulums = batch[0]
        total = torch.zeros((), device=pendulums.device)
        for _ in range(EPISODE):
            pendulums, reward = moved(pendulums, model.actor(observed(pendulums)))
            total += reward.sum()
        return {"return": (total, len(pendulums))}

    def to(self, device: torch.device) -> None:
        if self.buffer.device != device:
            self.buffer, self.pendulums = self.buffer.to(device), self.pendulums.to(device)
            self.age = self.age.to(device)
            self.target.to(device)


def observed(pendulums: Tensor) -> Tensor:
    angle, velocity = pendulums.unbind(dim=1)
    return torch.stack([angle.cos(), angle.sin(), velocity / 8], dim=1)


def moved(pendulums: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Move pendulums by 0.05 s, as in Gymnasium's Pendulum-v1; the reward is 0 for one that stands still, upright."""
    angle, velocity = pendulums.unbind(dim=1)
    angle = torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi
    torque = 2 * action[:, 0]
    cost = angle**2 + 0.1 * velocity**2 + 0.001 * torque**2
    velocity = (velocity + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
    return torch.stack([angle + velocity * 0.05, velocity], dim=1), -cost[:, None] / 10
