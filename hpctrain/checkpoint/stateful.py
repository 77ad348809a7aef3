"""The parts of a training whose state is in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol


class Stateful(Protocol):
    """A part of the training whose state is in checkpoints, as of `torch.distributed.checkpoint.stateful.Stateful`.

    Attributes:
        is_collective: whether `state` is collective. Then every rank calls it in each save; otherwise only the ranks
            that write do.
    """

    is_collective: ClassVar[bool] = False

    def state(self) -> dict[str, Any]:
        """Return the state by its keys in checkpoints, which no other part has; tensors aren't copied."""

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the state; not collective.

        Args:
            saved: all states of a checkpoint, by key (`Snapshot.states`). That of an earlier version may lack the keys
                of this part: then its state starts afresh.

        Raises:
            CheckpointError: the state belongs to another training.
        """


def states_of(parts: Iterable[Stateful], *, collective: bool) -> dict[str, Any]:
    """Return the states of all parts that are collective, or of all that aren't, in their order; so itself collective.

    Args:
        parts: in the same order on every rank.
        collective: which of them.
    """
    return {key: value for each in parts if each.is_collective is collective for key, value in each.state().items()}
