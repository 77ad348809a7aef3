"""The state that a task keeps outside of its model, such as metrics and callbacks."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.host_memory import HostCopy
from hpctrain.data.micro_batch import map_tensors
from hpctrain.distributed.world import World
from hpctrain.errors import CheckpointError, TaskError
from hpctrain.tasks.task import Task

METHODS = ("state_dict", "load_state_dict")

log = logging.getLogger("hpctrain.train")


class TaskState:
    """Saves and restores the state of a task that has `state_dict` and `load_state_dict`; each rank has its own.

    Args:
        task: with both methods, or without them.
        world: the ranks.

    Raises:
        TaskError: the task has one of the methods without the other.
    """

    def __init__(self, task: Task, world: World) -> None:
        # Any: the methods are optional, and torch's modules have them too, from which a task may be derived
        self._task: Any = task
        self._world = world
        self._name = type(task).__name__
        found = [method for method in METHODS if callable(getattr(task, method, None))]
        if len(found) == 1:
            (missing,) = {*METHODS} - {*found}
            raise TaskError(
                f"{self._name} has {found[0]}, but no {missing}: its state would be lost on resume; define both"
            )
        self._exists = bool(found)

    def check(self) -> None:
        """Check on this rank that the state can be saved; not collective.

        Raises:
            TaskError: it can't be stored in a checkpoint; the message names the value's place.
        """
        if self._exists:
            self._copy()

    def gather(self) -> list[dict[str, Any]] | None:
        """The state of every rank at rank zero, in rank order; None elsewhere, and if the task has none; collective.

        Raises:
            TaskError: as from `check`.
        """
        if not self._exists:
            return None
        if self._world.size == 1:
            return [self._copy()]
        sent = self._world.gather_bytes(_packed(self._copy()))
        return None if sent is None else [_unpacked(data) for data in sent]

    def restore(self, saved: Sequence[Mapping[str, Any]] | None) -> None:
        """Give the task its state from a checkpoint; not collective.

        Its tensors arrive on the CPU. At another world size each rank gets the state of rank zero.

        Args:
            saved: a result of `gather`; None if the checkpoint has none: then the task's state starts afresh.
        """
        warns = self._world.is_rank_zero
        if not self._exists:
            if saved and warns:
                log.warning("the checkpoint's state of the task is ignored: %s has no load_state_dict", self._name)
            return
        if not saved:
            if warns:
                log.warning("the checkpoint has no state of the task: that of %s starts afresh", self._name)
            return
        same_size = len(saved) == self._world.size
        if not same_size and warns:
            log.warning(
                "%d ranks saved a state of the task, and this attempt has %d: each gets that of rank zero",
                len(saved),
                self._world.size,
            )
        # a copy: the tensors of a loaded checkpoint are mapped from its files, which retention removes
        self._task.load_state_dict(self._plain(saved[self._world.rank if same_size else 0]))

    def snapshot(self) -> Any:
        """Return a copy of this rank's state, its tensors on their own devices; None if the task has none."""
        if not self._exists:
            return None
        return map_tensors(lambda tensor: tensor.detach().clone(), self._task.state_dict())

    def put_back(self, snapshot: Any) -> None:
        """Restore a result of `snapshot`."""
        if snapshot is not None:
            self._task.load_state_dict(snapshot)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state after the passes in the context."""
        before = self.snapshot()
        try:
            yield
        finally:
            self.put_back(before)

    def _copy(self) -> dict[str, Any]:
        state = self._task.state_dict()
        if not isinstance(state, Mapping):
            raise TaskError(f"{self._name}.state_dict must return a dict, but it returned a {type(state).__name__}")
        try:
            return self._plain(state)
        except CheckpointError as error:
            raise TaskError(str(error)) from None

    def _plain(self, state: Mapping[str, Any]) -> dict[str, Any]:
        copy = HostCopy()
        found: dict[str, Any] = copy.of(state, name=f"{self._name}.state_dict()")
        copy.finish()
        return found


def _packed(state: dict[str, Any]) -> Tensor:
    # messages between ranks are JSON, which would turn tuples into lists, and integers as keys into strings, and takes
    # seconds for tens of megabytes
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(data: Tensor) -> dict[str, Any]:
    # weights_only: another rank's data must not be able to execute code
    found: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return found
