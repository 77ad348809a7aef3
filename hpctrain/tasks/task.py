"""The contract between a task and the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.data.order import Order
from hpctrain.errors import TaskError
from hpctrain.tasks.contract import Scalar, split_loss
from hpctrain.tasks.log import TaskLog
from hpctrain.tasks.position import Position

Sums: TypeAlias = dict[str, tuple[Tensor | float, Tensor | int]]
"""By metric: the sum over a batch, and the number of summed values."""


class Task(ABC):
    """A model, its data and its loss. Subclass it anywhere, and name the class in a config by `_target_`.

    A subclass must define `train_dataset`, and `loss` unless its optimizers name other methods; every other method has
    a default. Its constructor takes plain values from conf/task/NAME.yaml, or from the command line, and runs in every
    rank: it should be cheap and touch no device. The trainer does the rest: device placement, DDP, precision,
    accumulation, seeding and checkpoints.

    A task that changes attributes of its own during training also defines `state_dict`, which returns them as a dict of
    tensors, numbers, strings, dicts, lists and tuples, and `load_state_dict`, which sets them. Every checkpoint holds
    the state of each rank. If a run resumes with another number of ranks, every rank gets rank zero's state.

    Attributes:
        metric: name of the evaluation metric that decides which checkpoint is best; a key in the result of `evaluate`
            or `derive`.
        metric_mode: `min` if smaller values are better, `max` if larger ones are.
        blocks: with `parallel=mesh`, names of the modules that are gathered one at a time, such as `("layers.*",)`;
            empty for those that the model repeats. `parallel.blocks` overrides it.
        collate_fn: None for PyTorch's default collation, or a method that makes a batch of a list of samples.
        log: logs scalars, images and other media from `loss` and `evaluate`; discards them outside of a training.
        position: step, epoch and progress of the training; at its start outside of one.

    Example:
        A file ``sine.py``, trained by ``python -m hpctrain task=custom task._target_=sine.Sine``::

            class Sine(Task):
                def build_model(self):
                    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

                def train_dataset(self):
                    angles = torch.linspace(-3, 3, 1000)[:, None]
                    return TensorDataset(angles, angles.sin())

                def loss(self, model, batch):
                    angles, targets = batch
                    return nn.functional.mse_loss(model(angles), targets)
    """

    metric: str = "loss"
    metric_mode: Literal["min", "max"] = "min"
    blocks: Sequence[str] = ()
    collate_fn: Callable[[list[Any]], Any] | None = None
    log: TaskLog = TaskLog()
    position: Position = Position()

    def prepare(self) -> None:  # noqa: B027  # a hook
        """Download or convert the task's data; called first, by one process per node while the others wait."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU; every rank builds it from the same seed. Not called if the config names a model.

        Each module is trained in the mode in which it is returned; but if the model itself is in evaluation mode, the
        trainer calls its `train()`.

        Raises:
            TaskError: the task doesn't define a model.
        """
        name = type(self).__name__
        raise TaskError(f"{name} has no model: name one in the config (model=convnet), or define {name}.build_model")

    def place(self, model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:  # noqa: ARG002 - as below
        """Put the model's parts on this process's devices; called if cluster.gpus_per_process is more than 1.

        Batches arrive on the first device, and the loss must end there; the model's forward moves tensors between its
        parts.

        Args:
            model: on the CPU.
            devices: GPUs, at least two; on a machine without any, the CPU, repeated as often as there would be GPUs.

        Returns:
            The model, with its parts on these devices.

        Raises:
            TaskError: the task doesn't define it.
        """
        name = type(self).__name__
        raise TaskError(
            f"cluster.gpus_per_process={len(devices)}, but {name} doesn't place its model on several devices: "
            f"define {name}.place, or set cluster.gpus_per_process=1"
        )

    def tensor_parallel_plan(self) -> Mapping[str, Any] | None:
        """Plan by which ranks compute the model's layers together; called if `parallel.tensor_degree` is more than 1.

        A model may define a method of this name, too, as hpctrain's GPT does; the task's goes first.

        Returns:
            Styles of `torch.distributed.tensor.parallel` by the names of modules, in which * and ? match within one
            part, between dots; None for the model's own plan.
        """
        return None

    def pipeline_plan(self) -> Sequence[str | Sequence[str]] | None:
        """Plan by which the model is cut into pipeline stages; called if `parallel.pipeline_degree` is more than 1.

        A model may define a method of this name, too, as hpctrain's GPT does; the task's goes first. An `nn.Sequential`
        needs none. In a pipeline, `loss` and `evaluate` call the model exactly once. What comes before that call runs
        in each stage, and what comes after it in the last one.

        Returns:
            Names of modules in the order in which a forward pass calls them; * and ? match within one part, between
            dots. Names in a tuple stay in one stage. A name may occur twice: stages then share its weights. None for
            the model's own plan.
        """
        return None

    @abstractmethod
    def train_dataset(self) -> Dataset[Any]:
        """The training samples, the same on all ranks.

        `BatchDataset` describes whole batches and random draws; `SeekableStream` and `StatefulStream` describe streams:
        iterable datasets, or other objects with `__iter__` and without `__getitem__`.
        """

    def order(self, num_samples: int, seed: int) -> Order | None:  # noqa: ARG002 - for those who override it
        """The order of the training samples; not called for an iterable dataset, which has its own.

        Args:
            num_samples: of the training dataset.
            seed: of the run.

        Returns:
            A function of (epoch, positions), such as `WeightedOrder`; None for the order that `data.shuffle` chooses.
        """
        return None

    def eval_dataset(self) -> Dataset[Any] | None:
        """The held-out samples, each evaluated exactly once over all ranks; None for no evaluation.

        An iterable dataset needs no length. With `__len__`, that many samples are evaluated; without, all up to the
        stream's end. As in training, every rank must yield the whole stream: one that splits itself among ranks is
        refused if it ends at different positions on different ranks, and is otherwise evaluated only in part.
        """
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Mapping[str, Scalar]:  # noqa: ARG002 - as above
        """The mean loss over the batch's samples, a scalar tensor with a gradient.

        The loop weights micro-batches by their number of samples, or by `loss_weight`, so that a step's gradient is
        that of the mean over the global batch. With several optimizers, each may name another method in its place
        (`optimizer.named`).

        Args:
            model: the model itself: call it, once or several times, its methods or its parts. DDP doesn't wrap the
                model, but this whole method. With `parallel=data_parallel`, it is DataParallel's wrapper. With
                `parallel=mesh`, its parameters are whole inside of the modules that are called.
            batch: on the model's device.

        Returns:
            The loss; or a mapping with it as `loss`. Its other values are scalars, each the mean over the batch's
            samples. They are averaged like the loss, and logged as `train/NAME`.

        Raises:
            TaskError: the task doesn't define it.
        """
        raise TaskError(f"{type(self).__name__} has no loss: define {type(self).__name__}.loss")

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Sums and counts of every metric over a batch; the trainer adds them up over batches and ranks, then divides.

        Called without gradients, in evaluation mode. The first call comes before the first step of a new run, or of a
        resume that changes the configuration (`trainer.sanity_batches`). The default returns the loss, and the other
        values of its mapping, weighted by `loss_weight`.

        Args:
            model: not wrapped by DDP.
            batch: on the model's device.

        Returns:
            By metric, the sum over the batch and the number of summed values, each a number or a tensor with one
            element; the same metrics for every batch. Also values per sample, for `compute_metrics`. It may be empty if
            the task has `build_metrics`.
        """
        # a task may have an attribute of that name
        weight = self.loss_weight(batch) if callable(self.loss_weight) else self.num_samples(batch)
        loss, scalars = split_loss(f"{type(self).__name__}.loss", self.loss(model, batch), set())
        return {name: (_weighted(value, weight), weight) for name, value in {"loss": loss, **scalars}.items()}

    def derive(self, means: Mapping[str, float]) -> Mapping[str, float]:  # noqa: ARG002 - for those who override it
        """More metrics, computed from the means over all held-out samples, such as a perplexity.

        Args:
            means: of the metrics that `evaluate` returned, by the same names.
        """
        return {}

    def build_metrics(self) -> Mapping[str, Any]:
        """Metric objects by name, which `evaluate` updates; called once, on each rank, after the model is built.

        The trainer resets them before each evaluation, reduces their states over all ranks, and logs what they compute.

        Returns:
            Subclasses of `hpctrain.tasks.Metric`, or metrics and collections of torchmetrics.
        """
        return {}

    def compute_metrics(self, samples: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002 - for those who override it
        """Metrics over all held-out samples together, such as an AUC; called on rank zero, without gradients.

        Args:
            samples: what `evaluate` returned as `PerSample`, by the same names, on the CPU: a tensor of shape
                [num_samples, ...], or a list with a tensor per sample, in the order of the held-out dataset.

        Returns:
            By metric a number, or a vector or a dict of numbers.

        Raises:
            TaskError: the task doesn't define it.
        """
        name = type(self).__name__
        raise TaskError(
            f"{name}.evaluate returns a PerSample: define {name}.compute_metrics, which computes metrics from it"
        )

    def num_samples(self, batch: Any) -> int:
        """Samples in a batch, its default weight; by default the first dimension of its first tensor.

        Raises:
            TaskError: the batch holds no tensor with a dimension.
        """
        for tensor in iterate_tensors(batch):
            if tensor.dim():
                return len(tensor)
        name = type(self).__name__
        raise TaskError(
            f"can't count the samples of a batch of type {type(batch).__name__}, which holds no tensor with a first "
            f"dimension: define {name}.num_samples"
        )

    def loss_weight(self, batch: Any) -> Tensor | float:
        """Weight of a batch's losses: the number of things over which they are means. Default: its number of samples.

        The loss of a step is the weighted mean of its micro-batches' losses, whatever the number of ranks and the
        micro-batch size; so are the values that are logged with it. Override this if the loss is a mean over something
        other than samples, such as the tokens that aren't padding. A micro-batch of weight 0 adds nothing.

        Called once per micro-batch, on every rank that has it; several losses share one weight.

        Args:
            batch: as `collate_fn` returns it, on the CPU; in an evaluation, on the model's device.

        Returns:
            A finite number of at least 0, or a tensor with one element; it must depend on the batch alone.
        """
        return self.num_samples(batch)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Copy the batch to a device without waiting; the default copies every tensor in its containers.

        With loading processes (`data.num_workers` above 0), the default's copies overlap with the previous step. If you
        override this method, hpctrain calls it only when the batch is needed, in the stream that computes, so it may
        draw random numbers or read `self.position`.
        """
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _weighted(value: Scalar, weight: Scalar) -> Scalar:
    """Multiply a mean by its weight; 0 if the weight is 0, since the mean over nothing is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight != 0, value * weight, 0)
    return value * weight if weight else 0.0


def classification_sums(logits: Tensor, labels: Tensor) -> Sums:
    """Compute the result of `Task.evaluate` for a classifier: cross-entropy and accuracy.

    Args:
        logits: of shape [n, num_classes].
        labels: int64 of shape [n].
    """
    return {
        "loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
        "accuracy": ((logits.argmax(1) == labels).sum(), len(labels)),
    }
