"""The moment at which a rank has all of its own gradients, and only waits for the others'."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class LastGradient:
    """Notices it by hooks on the parameters, which fire before DDP hands the gradient on.

    At first every parameter has one; from then on only that whose gradient came last. Where the order of a model's
    gradients varies, and that one gets none, all are watched in the next backward.

    Args:
        parameters: of the replica.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = [parameter for parameter in parameters if parameter.requires_grad]
        self._watched = self._all
        self._handles: list[RemovableHandle] = []
        self._last: Tensor | None = None

    def watch(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called in the next backward whenever another of the watched gradients is there."""

        def note(parameter: Tensor) -> None:
            self._last = parameter
            tell()

        self._last = None
        # after the forward: a compiled one would notice the hooks
        self._handles = [
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for parameter in self._watched
        ]

    def settle(self) -> bool:
        """Remove the hooks; whether any was reached since `watch`."""
        if not self._handles:
            return False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._watched = self._all if self._last is None else [p for p in self._all if p is self._last]
        return self._last is not None
