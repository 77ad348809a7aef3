"""Find parameters that a loss trains but gives no gradient, before other ranks wait for that gradient forever."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hpctrain.config.parallel import Parallel
from hpctrain.errors import TaskError
from hpctrain.phrases import either, listed
from hpctrain.train.empty_pass import zero_of
from hpctrain.train.turn import Turn

USE_MODEL_ARGUMENT = "compute the loss with the model that the method gets as its argument"
FREEZE_UNUSED = "freeze them, or set parallel.find_unused_parameters=true: DDP waits for these gradients"
RETURN_ZERO_LOSS = (
    "other ranks wait for it; where a batch has nothing to learn from, return a loss that depends on the model, such "
    "as 0 * model(inputs).sum()"
)

log = logging.getLogger("hpctrain.train")


def check_gradients(turn: Turn, parallel: Parallel, *, warns: bool = True) -> None:
    """Log a warning that names the parameters without a gradient, after a backward pass of the turn.

    Args:
        turn: whose gradients are looked at.
        parallel: of the configuration.
        warns: whether this rank logs.

    Raises:
        TaskError: no parameter has a gradient, or DDP waits for those that are missing, which leaves others unreduced.
    """
    module = turn.module
    own = _own(turn)
    unused = [parameter for parameter in own if parameter.grad is None]
    if not unused:
        return
    problem = _problem(turn, unused)
    if len(unused) == len(own):
        raise TaskError(f"{problem}: {USE_MODEL_ARGUMENT}")
    if module.ddp is not None and not (parallel.find_unused_parameters or parallel.static_graph):
        raise TaskError(f"{problem}: {FREEZE_UNUSED}")
    if warns:
        log.warning("%s: freeze them, unless a later step uses them", problem)


class SharedGradients:
    """Keeps a rank in step with those that average their gradients with its own, in every step after the first.

    A rank without a target may return a constant as its loss, whose backward pass reaches no parameter. DDP would wait
    for its gradients on the other ranks, and this rank would train on without theirs.

    Args:
        turn: whose gradients the ranks average.
        parallel: of the configuration.
    """

    def __init__(self, turn: Turn, parallel: Parallel) -> None:
        self._turn = turn
        self._parallel = parallel
        self._has_ddp = turn.module.ddp is not None
        self._check_finalized = _check_of_reducer(turn.module.ddp)
        self._witness = _own(turn)[0]
        self._was_constant = False
        turn.loss.complete_constant = self.complete_constant
        turn.backward_to_share = self.backward

    def check_first(self, *, warns: bool = True) -> None:
        """As `check_gradients`; ranks also refuse a loss that is a constant on all of them.

        Args:
            warns: whether this rank logs.
        """
        own = _own(self._turn)
        if self._was_constant and not any(parameter.grad is not None and parameter.grad.any() for parameter in own):
            raise TaskError(f"{_problem(self._turn, own)}: {USE_MODEL_ARGUMENT}")
        check_gradients(self._turn, self._parallel, warns=warns)

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
        if not self._has_ddp:
            raise TaskError(f"{_problem(self._turn, _own(self._turn))}; {RETURN_ZERO_LOSS}")
        self._was_constant = True
        zero = zero_of(model)
        return loss.to(zero.device) + zero.to(loss.dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss in the last micro-batch of a step; collective.

        Raises:
            TaskError: parameters got no gradient, and other ranks wait for it.
        """
        gradient = self._witness.grad
        version = None if gradient is None else gradient._version
        self._turn.update.backward(loss)
        if self._check_finalized is not None:
            try:
                self._check_finalized()
            except RuntimeError:
                unused = self._unreached(loss)
                raise TaskError(f"{_problem(self._turn, unused or _own(self._turn))}: {FREEZE_UNUSED}") from None
        gradient = self._witness.grad
        if gradient is None or gradient._version == version:
            self._require_any(loss)

    def _require_any(self, loss: Tensor) -> None:
        """Refuse a loss that has given no parameter a gradient; the witness alone may be one that isn't used."""
        own = _own(self._turn)
        if not self._has_ddp:
            used = [parameter for parameter in own if parameter.grad is not None]
        else:
            unused = set(self._unreached(loss))
            used = [parameter for parameter in own if parameter not in unused]
        if not used:
            raise TaskError(f"{_problem(self._turn, own)}; {RETURN_ZERO_LOSS}")
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
        return [parameter for parameter in _own(self._turn) if parameter not in reached]


def _check_of_reducer(ddp: nn.Module | None) -> Callable[[], object] | None:
    """Return DDP's check that all ranks' gradients are averaged; None without DDP, or in a torch without this check."""
    # private in torch 2.11 to 2.13; without it, DDP itself raises an error in the next forward pass
    check: Callable[[], object] | None = getattr(getattr(ddp, "reducer", None), "_check_reducer_finalized", None)
    if check is not None:
        with contextlib.suppress(Exception):
            check()  # before the first backward pass there is nothing to wait for
            return check
    return None


def _own(turn: Turn) -> list[nn.Parameter]:
    # in a pipeline, other ranks train what is on `meta`
    return [parameter for parameter in turn.module.unfrozen if not parameter.is_meta]


def _problem(turn: Turn, unused: Sequence[nn.Parameter]) -> str:
    optimizers = [f"optimizer.named.{update.name}" for update in turn.update.updates if update.name]
    names = listed(turn.module.names_of(unused), shown=5)
    trains = f"{either(optimizers)} trains for this loss" if optimizers else "it trains"
    return f"{turn.loss.method} gave no gradient to {names}, which {trains}"
