"""The module of a turn: its replica over the ranks, those of its parameters that the turn trains, and empty passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoint.state import PlainNames
from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.parallel.replica import Replica
from hpctrain.rank.compiler import uncompiled
from hpctrain.train.modes import frozen_batch_norms


class TrainedModule:
    """A module, and those of its parameters that a turn trains, some of them perhaps only from a later step on.

    Args:
        module: that computes the loss, without DDP's wrapper.
        trained_from: parameters of the module, and the completed steps from which each is trained.
        replica: of the module; None if no other rank computes with it.

    Attributes:
        replica: of the module.
        loss_module: what is called in training (`Replica.for_loss`), once `prepare` was called.
        ddp: the same if it is in DDP, else None.
        accumulating: see `Replica.accumulating`.
        shares_statistics: whether the model has a `SyncBatchNorm`, whose statistics are those of all ranks' samples.
        exchanges_nothing: whether the ranks exchange neither parts of the weights nor batch statistics in a pass.
        unfrozen: parameters that are trained in this step, once `prepare` was called.
        added: those of them that the last replica is the first to train.
    """

    def __init__(
        self,
        module: nn.Module,
        trained_from: Iterable[tuple[nn.Parameter, int]],
        replica: Replica | None = None,
    ) -> None:
        self.replica = replica or Replica(module)
        self.loss_module = module
        self.ddp: DistributedDataParallel | None = None
        self.accumulating: Callable[[], AbstractContextManager[object]] | None = None
        self.shares_statistics = False
        self.exchanges_nothing = True
        self.unfrozen: Sequence[nn.Parameter] = ()
        self.added: Sequence[nn.Parameter] = ()
        self._module = module
        self._trained_from = list(trained_from)

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters that the turn trains, in the model's order."""
        return [parameter for parameter, _ in self._trained_from]

    def names_of(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Return the plain names of parameters of the module."""
        plain = PlainNames(self._module)
        names = {parameter: plain(name) for name, parameter in self._module.named_parameters()}
        return [names[parameter] for parameter in parameters]

    def prepare(self, step: int) -> bool:
        """Build the replica for the parameters that are trained from step ``step`` on; collective.

        No other parameter may require a gradient, unless it belongs to no turn.

        Args:
            step: counted from 0.

        Returns:
            Whether it had to be built.
        """
        unfrozen = [parameter for parameter, since in self._trained_from if since <= step]
        if len(unfrozen) == len(self.unfrozen):
            return False
        before = set(self.unfrozen)
        self.added = [parameter for parameter in unfrozen if parameter not in before]
        self.unfrozen = unfrozen
        self.require_gradients(True)
        loss_module = self.loss_module = self.replica.for_loss(self._module, self.loss_module)
        self.ddp = loss_module if isinstance(loss_module, DistributedDataParallel) else None
        self.accumulating = self.replica.accumulating(loss_module)
        self.shares_statistics = any(isinstance(part, nn.SyncBatchNorm) for part in self._module.modules())
        self.exchanges_nothing = not self.shares_statistics and not self.replica.is_shared
        return True

    def next_change(self, step: int) -> int | None:
        """Return the first step after ``step`` from which more parameters are trained; None without one."""
        return min((since for _, since in self._trained_from if since > step), default=None)

    def require_gradients(self, required: bool) -> None:
        """Have the parameters that are trained in this step require gradients, or not."""
        for parameter in self.unfrozen:
            parameter.requires_grad = required

    @contextmanager
    def gradients_required(self) -> Iterator[None]:
        """Require gradients in the context, and afterwards only if they are required now."""
        before = [parameter.requires_grad for parameter in self.unfrozen]
        self.require_gradients(True)
        try:
            yield
        finally:
            for parameter, required in zip(self.unfrozen, before, strict=True):
                parameter.requires_grad = required


class EmptyPass:
    """A forward and a backward pass whose gradients are zero, even if the loss is NaN because it has no samples.

    A loss multiplied by zero isn't enough: where a mean over nothing divides by zero, its gradient becomes NaN. So
    gradients are set to zero where they reach a module's output or a parameter. With `SyncBatchNorm`, the losses of
    other ranks have gradients that pass through this rank's samples: then only NaN and infinity are set to zero.

    Args:
        shares_statistics: whether the model has a `SyncBatchNorm`.
    """

    def __init__(self, *, shares_statistics: bool) -> None:
        self._parameters: list[Tensor] = []
        self._clean: Callable[[Tensor], Tensor] = torch.zeros_like
        if shares_statistics:
            self._clean = partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=0.0)

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Context in which to compute the loss; divide it by infinity before the backward pass.

        Args:
            model: that computes the loss.
        """

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in iterate_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._clean)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # where ranks share the model, these are the gathered weights
            self._parameters += [parameter for parameter in module._parameters.values() if parameter is not None]

        handle = register_module_forward_hook(hook)
        try:
            with uncompiled(), frozen_batch_norms(model):
                yield
        finally:
            handle.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context in which to compute the gradients."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        handles = [parameter.register_hook(self._clean) for parameter in trained]  # type: ignore[no-untyped-call]  # as above
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def zero_of(model: nn.Module) -> Tensor:
    """Return 0 as a loss, 0-d, that depends on every parameter: DDP waits for the gradients of each."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # over no elements, so that a parameter that isn't finite doesn't make it NaN
    sums = [parameter.reshape(-1)[:0].abs().sum().to(trained[0].device, torch.float32) for parameter in trained]
    return torch.stack(sums).sum()
