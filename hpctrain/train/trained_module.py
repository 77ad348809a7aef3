"""The module of a turn: those of its parameters that the turn trains, empty passes, and checks of its gradients."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoint.state import PlainNames
from hpctrain.config.parallel import Parallel
from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.errors import TaskError
from hpctrain.parallel.mesh import DataShare
from hpctrain.parallel.replica import Replica
from hpctrain.parallel.trial_pass import attribute_restored
from hpctrain.phrases import either, listed
from hpctrain.rank.compiler import uncompiled
from hpctrain.train.modes import frozen_batch_norms
from hpctrain.train.update import JointUpdate


class TrainedModule:
    """A module, and those of its parameters that a turn trains, some of them perhaps only from a later step on.

    Args:
        module: that computes the loss, without DDP's wrapper.
        trained_from: parameters of the module, and the completed steps from which each is trained.
        replica: of the module; None if no other rank computes with it.

    Attributes:
        replica: of the module.
        loss_module: what is called in training (`Replica.build_loss_module`), once `prepare` was called.
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
        loss_module = self.loss_module = self.replica.build_loss_module(self._module, self.loss_module)
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
        with attribute_restored(self.unfrozen, "requires_grad"):
            self.require_gradients(True)
            yield


class EmptyPass:
    """A forward and a backward pass whose gradients are zero, even if the loss is NaN because it has no samples.

    A loss multiplied by zero isn't enough: where a mean over nothing divides by zero, its gradient becomes NaN. So
    gradients are set to zero where they reach a module's output or a parameter. With `SyncBatchNorm`, the losses of
    other ranks have gradients that pass through this rank's samples: then only NaN and infinity are set to zero. An
    undefined gradient wouldn't do either: FSDP2's hooks aren't called with it, and the other ranks wait.

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


def zero_of(model: nn.Module, *, of_first: bool = False) -> Tensor:
    """Return 0 as a loss, 0-d, that depends on every parameter: DDP waits for the gradients of each.

    Args:
        model: that is trained.
        of_first: depend on the first parameter alone, where DDP finds out which ones are used.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad][: 1 if of_first else None]
    # over no elements, so that a parameter that isn't finite doesn't make it NaN
    sums = [parameter.reshape(-1)[:0].abs().sum().to(trained[0].device, torch.float32) for parameter in trained]
    return torch.stack(sums).sum()


USE_MODEL_ARGUMENT = "compute the loss with the model that the method gets as its argument"
FREEZE_UNUSED = "freeze them, or set parallel.find_unused_parameters=true: DDP waits for these gradients"
RETURN_ZERO_LOSS = (
    "other ranks wait for it; where a batch has nothing to learn from, return a loss that depends on the model, such "
    "as 0 * model(inputs).sum()"
)

log = logging.getLogger("hpctrain.train")


@dataclass(eq=False)
class GradientCheck:
    """Checks after the first backward pass over a replica that the parameters have gradients.

    In every step after the first, it also keeps ranks in step that average their gradients: a rank without a target may
    return a constant as its loss, whose backward pass reaches no parameter. Then DDP would wait for its gradients on
    the other ranks, and this rank would continue without theirs.

    Attributes:
        method: the task's class and the method that computes the loss, for messages.
        module: has the parameters, and the replica.
        update: of the optimizers that train them.
        parallel: of the configuration.
        share: of this rank.
        is_due: whether `check` is to be called after the next backward pass.
        is_awaited: whether other ranks wait for the gradients of the replica; not before `restart`.
    """

    method: str
    module: TrainedModule
    update: JointUpdate
    parallel: Parallel
    share: DataShare
    is_due: bool = field(default=False, init=False)
    is_awaited: bool = field(default=False, init=False)
    _check_finalized: Callable[[], object] | None = field(default=None, init=False)
    _witness: nn.Parameter | None = field(default=None, init=False)
    _was_constant: bool = field(default=False, init=False)

    def restart(self) -> None:
        """Begin with a replica that was just built."""
        parameters = self._local_parameters()
        self.is_due = True
        self.is_awaited = self.share.count > 1 and bool(parameters)
        self._was_constant = False
        if self.is_awaited:
            self._check_finalized = _check_of_reducer(self.module.ddp)
            self._witness = parameters[0]

    def check(self) -> None:
        """Log a warning that names the parameters without a gradient, after a backward pass.

        Raises:
            TaskError: no parameter has a gradient, or DDP waits for those that are missing, which leaves others
                unreduced; or the loss is a constant on all ranks.
        """
        parameters = self._local_parameters()
        if self._was_constant and not any(
            parameter.grad is not None and parameter.grad.any() for parameter in parameters
        ):
            raise TaskError(f"{self._problem(parameters)}: {USE_MODEL_ARGUMENT}")
        self.is_due = False
        unused = [parameter for parameter in parameters if parameter.grad is None]
        if not unused:
            return
        problem = self._problem(unused)
        if len(unused) == len(parameters):
            raise TaskError(f"{problem}: {USE_MODEL_ARGUMENT}")
        if self.module.ddp is not None and not (self.parallel.find_unused_parameters or self.parallel.static_graph):
            raise TaskError(f"{problem}: {FREEZE_UNUSED}")
        if self.share.leads:
            log.warning("%s: freeze them, unless a later step uses them", problem)

    def complete_constant(self, loss: Tensor, model: nn.Module) -> Tensor:
        """Make a loss that is a constant depend on all parameters, whose gradients are then 0.

        Args:
            loss: that no operation has computed, 0-d.
            model: whose gradients DDP averages.

        Raises:
            TaskError: parts of the model are on several ranks, which exchange them in its backward pass.
        """
        if not loss.requires_grad:
            return loss  # its backward pass raises an error, at any world size
        if self.module.ddp is None:
            raise TaskError(f"{self._problem(self._local_parameters())}; {RETURN_ZERO_LOSS}")
        self._was_constant = True
        zero = zero_of(model)
        return loss.to(zero.device) + zero.to(loss.dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss in the last micro-batch of a step; collective.

        Raises:
            TaskError: parameters got no gradient, and other ranks wait for it.
        """
        assert self._witness is not None
        gradient = self._witness.grad
        version = None if gradient is None else gradient._version
        self.update.backward(loss)
        if self._check_finalized is not None:
            try:
                self._check_finalized()
            except RuntimeError:
                unused = self._unreached(loss)
                raise TaskError(f"{self._problem(unused or self._local_parameters())}: {FREEZE_UNUSED}") from None
        gradient = self._witness.grad
        if gradient is None or gradient._version == version:
            self._require_any(loss)

    def _require_any(self, loss: Tensor) -> None:
        """Refuse a loss that has given no parameter a gradient; the witness alone may be one that isn't used."""
        parameters = self._local_parameters()
        if self.module.ddp is None:
            with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        else:
            unused = set(self._unreached(loss))
            with_gradient = [parameter for parameter in parameters if parameter not in unused]
        if not with_gradient:
            raise TaskError(f"{self._problem(parameters)}; {RETURN_ZERO_LOSS}")
        self._witness = with_gradient[0]

    def _unreached(self, loss: Tensor) -> list[nn.Parameter]:
        """The parameters that the backward pass of a loss doesn't reach: earlier micro-batches gave gradients, too."""
        nodes, visited, reached = [loss.grad_fn], set(), set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in visited:
                visited.add(node)
                reached.add(getattr(node, "variable", None))
                nodes += [following for following, _ in node.next_functions]
        return [parameter for parameter in self._local_parameters() if parameter not in reached]

    def _local_parameters(self) -> list[nn.Parameter]:
        # other ranks train what is on `meta`
        return [parameter for parameter in self.module.unfrozen if not parameter.is_meta]

    def _problem(self, unused: Sequence[nn.Parameter]) -> str:
        optimizers = [f"optimizer.named.{update.name}" for update in self.update.updates if update.name]
        names = listed(self.module.names_of(unused), max_names=5)
        trains = f"{either(optimizers)} trains for this loss" if optimizers else "it trains"
        return f"{self.method} gave no gradient to {names}, which {trains}"


def _check_of_reducer(ddp: nn.Module | None) -> Callable[[], object] | None:
    """Return DDP's check that all ranks' gradients are averaged; None without DDP, or in a torch without this check."""
    # private in torch 2.11 to 2.13; without it, DDP itself raises an error in the next forward pass
    check: Callable[[], object] | None = getattr(getattr(ddp, "reducer", None), "_check_reducer_finalized", None)
    if check is not None:
        with contextlib.suppress(Exception):
            check()  # before the first backward pass there is nothing to wait for
            return check
    return None
