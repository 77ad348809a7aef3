"""Find parameters that a loss trains but gives no gradient, before other ranks wait for that gradient forever."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hpctrain.config.parallel import Parallel
from hpctrain.errors import TaskError
from hpctrain.parallel.mesh import DataShare
from hpctrain.phrases import either, listed
from hpctrain.train.trained_module import TrainedModule, zero_of
from hpctrain.train.update import JointUpdate

USE_MODEL_ARGUMENT = "compute the loss with the model that the method gets as its argument"
FREEZE_UNUSED = "freeze them, or set parallel.find_unused_parameters=true: DDP waits for these gradients"
RETURN_ZERO_LOSS = (
    "other ranks wait for it; where a batch has nothing to learn from, return a loss that depends on the model, such "
    "as 0 * model(inputs).sum()"
)

log = logging.getLogger("hpctrain.train")


class GradientCheck:
    """Checks after the first backward pass over a replica that the parameters have gradients.

    In every step after the first, it also keeps ranks in step that average their gradients: a rank without a target may
    return a constant as its loss, whose backward pass reaches no parameter. Then DDP would wait for its gradients on
    the other ranks, and this rank would continue without theirs.

    Args:
        method: the task's class and the method that computes the loss, for messages.
        module: has the parameters, and the replica.
        update: of the optimizers that train them.
        parallel: of the configuration.
        share: of this rank.

    Attributes:
        is_due: whether `check` is to be called after the next backward pass.
        is_shared: whether other ranks wait for the gradients of the replica; not before `restart`.
    """

    def __init__(
        self, method: str, module: TrainedModule, update: JointUpdate, parallel: Parallel, share: DataShare
    ) -> None:
        self.is_due = False
        self.is_shared = False
        self._method = method
        self._module = module
        self._update = update
        self._parallel = parallel
        self._share = share
        self._check_finalized: Callable[[], object] | None = None
        self._witness: nn.Parameter | None = None
        self._was_constant = False

    def restart(self) -> None:
        """Begin with a replica that was just built."""
        parameters = self._local_parameters()
        self.is_due = True
        self.is_shared = self._share.count > 1 and bool(parameters)
        self._was_constant = False
        if self.is_shared:
            self._check_finalized = _check_of_reducer(self._module.ddp)
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
        if self._module.ddp is not None and not (self._parallel.find_unused_parameters or self._parallel.static_graph):
            raise TaskError(f"{problem}: {FREEZE_UNUSED}")
        if self._share.leads:
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
        if self._module.ddp is None:
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
        self._update.backward(loss)
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
        if self._module.ddp is None:
            used = [parameter for parameter in parameters if parameter.grad is not None]
        else:
            unused = set(self._unreached(loss))
            used = [parameter for parameter in parameters if parameter not in unused]
        if not used:
            raise TaskError(f"{self._problem(parameters)}; {RETURN_ZERO_LOSS}")
        self._witness = used[0]

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
        return [parameter for parameter in self._module.unfrozen if not parameter.is_meta]

    def _problem(self, unused: Sequence[nn.Parameter]) -> str:
        optimizers = [f"optimizer.named.{update.name}" for update in self._update.updates if update.name]
        names = listed(self._module.names_of(unused), shown=5)
        trains = f"{either(optimizers)} trains for this loss" if optimizers else "it trains"
        return f"{self._method} gave no gradient to {names}, which {trains}"


def _check_of_reducer(ddp: nn.Module | None) -> Callable[[], object] | None:
    """Return DDP's check that all ranks' gradients are averaged; None without DDP, or in a torch without this check."""
    # private in torch 2.11 to 2.13; without it, DDP itself raises an error in the next forward pass
    check: Callable[[], object] | None = getattr(getattr(ddp, "reducer", None), "_check_reducer_finalized", None)
    if check is not None:
        with contextlib.suppress(Exception):
            check()  # before the first backward pass there is nothing to wait for
            return check
    return None
