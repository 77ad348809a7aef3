"""The module of a turn: its replica over the ranks, and those of its parameters that the turn trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoint.state import PlainNames
from hpctrain.distributed.replica import LossModule, dismantle


class TrainedModule:
    """A module, and those of its parameters that a turn trains, some of them perhaps only from a later step on.

    Args:
        module: that computes the loss, without DDP's wrapper.
        trained_from: parameters of the module, and the completed steps from which each is trained.
        replicate: makes the replica of a module whose forward pass is a whole loss; collective.

    Attributes:
        replica: what is called in training, as a `LossModule` is, once `prepare` was called.
        ddp: the replica if it is in DDP, else None.
        accumulating: makes a context for forward and backward of the micro-batches before the last one of a step, in
            which gradients aren't reduced; None if they are reduced all the same.
        unfrozen: parameters that are trained in this step, once `prepare` was called.
        added: those of them that the last replica is the first to train.
    """

    def __init__(
        self,
        module: nn.Module,
        trained_from: Iterable[tuple[nn.Parameter, int]],
        *,
        replicate: Callable[[nn.Module], nn.Module] = LossModule,
    ) -> None:
        self.replica = module
        self.ddp: DistributedDataParallel | None = None
        self.accumulating: Callable[[], AbstractContextManager[object]] | None = None
        self.unfrozen: Sequence[nn.Parameter] = ()
        self.added: Sequence[nn.Parameter] = ()
        self._module = module
        self._trained_from = list(trained_from)
        self._replicate = replicate

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
        dismantle(self.replica)
        self.replica = self._replicate(self._module)
        self.ddp = self.replica if isinstance(self.replica, DistributedDataParallel) else None
        self.accumulating = getattr(self.replica, "accumulating", None) if self.ddp is None else self.ddp.no_sync
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
