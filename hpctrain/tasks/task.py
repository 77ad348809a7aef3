"""The contract between what is trained and the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.data.order import Order
from hpctrain.errors import TaskError

Sums: TypeAlias = dict[str, tuple[Tensor | float, Tensor | int]]


class Task(ABC):
    """A model, its data and its loss. Subclass it anywhere, and name the class in a config by `_target_`.

    `train_dataset` and `loss` must be given; everything else has a default. The constructor takes plain values from
    conf/task/NAME.yaml and runs in every rank, so it should be cheap and touch no device. Device placement, DDP,
    precision, accumulation, seeding and checkpoints are the trainer's.

    Attributes:
        metric: name of the evaluation metric that the run is judged by; a key of what `evaluate` or `derive` returns.
        metric_mode: `min` where less of it is better, `max` where more is.
        collate_fn: None for PyTorch's default collation, or a method that makes a batch of a list of samples.
    """

    metric: str = "loss"
    metric_mode: Literal["min", "max"] = "min"
    collate_fn: Callable[[list[Any]], Any] | None = None

    def prepare(self) -> None:  # noqa: B027  # a hook
        """Download or convert what the task needs; called first, by one process per node while its others wait."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU; every rank builds it from the same seed. Not called where the config gives a model.

        Raises:
            TaskError: the task has no model of its own.
        """
        name = type(self).__name__
        raise TaskError(f"{name} has no model: give one in the config (model=convnet), or define {name}.build_model")

    def place(self, model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:  # noqa: ARG002 - as below
        """Put the model's parts on this process's devices; called where cluster.gpus_per_process is more than 1.

        Batches arrive on the first device, and the loss has to be there; between the parts the model's forward moves
        its tensors itself.

        Args:
            model: on the CPU.
            devices: GPUs, at least two; on a machine without any, the CPU as often as there would be GPUs.

        Raises:
            TaskError: the task doesn't know how.
        """
        name = type(self).__name__
        raise TaskError(
            f"cluster.gpus_per_process={len(devices)}, but {name} doesn't place its model on several devices: "
            f"define {name}.place, or set cluster.gpus_per_process=1"
        )

    @abstractmethod
    def train_dataset(self) -> Dataset[Any]:
        """The training samples, the same on all ranks; `BatchDataset` tells of whole batches and of random draws."""

    def order(self, num_samples: int, seed: int) -> Order | None:  # noqa: ARG002 - for those who override it
        """In which order the training samples are taken; None for what data.shuffle says.

        `WeightedOrder` of hpctrain.data.order draws by weight; any function of (epoch, positions) will do (`Order`). An
        iterable dataset has its own order.

        Args:
            num_samples: of the training dataset.
            seed: of the run.
        """
        return None

    def eval_dataset(self) -> Dataset[Any] | None:
        """The held-out samples, each evaluated exactly once over all ranks; None for no evaluation."""
        return None

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the batch's samples, a scalar tensor with a gradient.

        The loop weights micro-batches by their number of samples, so that a step's gradient is that of the mean over
        the global batch.

        Args:
            model: wrapped by DDP perhaps: call it, and leave its methods and attributes alone.
            batch: on the model's device.
        """

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        """Sums and counts of every metric over a batch; the trainer adds them up over batches and ranks, then divides.

        Called without gradients, in evaluation mode. The default is the loss, weighted by samples.

        Returns:
            For every metric its sum over the batch and the count that the sum is over.
        """
        count = self.num_samples(batch)
        return {"loss": (self.loss(model, batch) * count, count)}

    def derive(self, means: Mapping[str, float]) -> Mapping[str, float]:  # noqa: ARG002 - for those who override it
        """More metrics, from the means over all held-out samples: a perplexity, which no mean over batches is.

        Args:
            means: what `evaluate` gave, by the same names, added up over batches and ranks and divided.
        """
        return {}

    def num_samples(self, batch: Any) -> int:
        """Samples in a batch; the default is the first dimension of its first tensor.

        Raises:
            TaskError: no tensor with a dimension in the batch.
        """
        for tensor in iterate_tensors(batch):
            if tensor.dim():
                return len(tensor)
        name = type(self).__name__
        raise TaskError(
            f"can't count the samples of a batch of type {type(batch).__name__}: it holds no tensor with a first "
            f"dimension; define {name}.num_samples"
        )

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """The batch on a device, without waiting for the copy; the default moves every tensor in its containers."""
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
