"""The state that a task keeps outside of its model, such as metrics and callbacks."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.host_memory import plain_copy
from hpctrain.checkpoint.state import Stateful
from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.errors import TaskError
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.rank.message import pack, unpack
from hpctrain.tasks.log import TaskLog
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task

SET_BY_TRAINER = (TaskLog, Position)
"""Types of the attributes that the trainer sets on a task, which aren't part of its state."""
METHODS = ("state_dict", "load_state_dict")

CONTAINERS = (list, deque, dict, defaultdict, OrderedDict, Counter, set)
"""Whose contents are remembered; a subclass of them may not let itself be changed."""
LARGEST = 1000
"""Most items of a container whose contents are remembered: a larger one holds data, and copying it can take long."""

log = logging.getLogger("hpctrain.train")


class TaskState(Stateful):
    """Saves and restores the state of a task that has `state_dict` and `load_state_dict`; each rank has its own.

    The task itself isn't pickled: a checkpoint must be readable with `weights_only=True`. And the state is that of
    every rank: ranks that count their own samples would differ after a resume from rank zero's alone.

    Args:
        task: with both methods, or without them.
        world: the ranks.

    Raises:
        TaskError: the task has one of the methods without the other.
    """

    is_collective: ClassVar[bool] = True

    def __init__(self, task: Task, world: TrainingWorld) -> None:
        # Any: the methods are optional, and torch's modules have them too, from which a task may be derived
        self._task: Any = task
        self._world = world
        self._name = type(task).__name__
        self._inherits = all(getattr(type(task), name, None) is getattr(nn.Module, name) for name in METHODS)
        self._left_out: set[str] = set()
        methods = [method for method in METHODS if callable(getattr(task, method, None))]
        if len(methods) == 1:
            (missing,) = {*METHODS} - {*methods}
            raise TaskError(
                f"{self._name} has {methods[0]}, but no {missing}: its state would be lost on resume; define both"
            )
        self._exists = bool(methods)

    def leave_out(self, model: nn.Module) -> None:
        """Save no modules of the model, if the task inherits its methods from `nn.Module`.

        Such a task may hold the model as an attribute, and then has it in its state dict.

        Args:
            model: in training, not wrapped.
        """
        if self._inherits:
            inside = {id(module) for module in model.modules()}
            modules = self._task.named_modules(remove_duplicate=False)
            self._left_out = {path for path, module in modules if id(module) in inside}
            self._exists = bool(self._state())

    def check(self) -> None:
        """Check on this rank that the state can be saved; not collective.

        Raises:
            TaskError: it can't be stored in a checkpoint; the message names the value's place.
        """
        if self._exists:
            self._copy()

    def state(self) -> dict[str, Any]:
        """Return the state of every rank at rank zero; None elsewhere, and if the task has none; collective.

        Returns:
            ``task``: in rank order, for each rank its ``state``, on the CPU, and the ``places`` of the state's tensors
            (`place_of`).

        Raises:
            TaskError: as from `check`.
        """
        if not self._exists:
            return {"task": None}
        if self._world.size == 1:
            return {"task": [self._copy()]}
        packets = self._world.gather_bytes(pack(self._copy()))
        # ranks that compute layers together have the same state
        return {
            "task": None if packets is None else [unpack(data) for data in packets[:: self._world.share.num_together]]
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Give the task its state from a checkpoint; not collective.

        Tensors that were saved from a GPU arrive on the same one of this rank's devices, and others on the CPU. At
        another world size, or with other layers of the model, each rank gets the state of rank zero: hpctrain can't
        know whether to add, average or copy the states.
        """
        task, warns = saved.get("task"), self._world.is_rank_zero
        together, same_layers = self._world.share.num_together, self._world.share.has_saved_layers(saved)
        if not self._exists:
            if task and warns:
                log.warning("ignoring the task state in the checkpoint: %s has no load_state_dict", self._name)
            return
        if not task:
            if warns:
                log.warning("the checkpoint has no task state: %s starts with a fresh one", self._name)
            return
        same_size = len(task) == self._world.size // together
        if not same_size and warns:
            log.warning(
                "%d ranks saved a task state, and this attempt has %d: each rank gets rank zero's",
                len(task),
                self._world.size // together,
            )
        if same_size and not same_layers and warns:
            log.warning("the ranks have other stages of the model than before: each gets rank zero's task state")
        entry = task[self._world.rank // together if same_size and same_layers else 0]
        places = zip(iterate_tensors(entry["state"]), entry["places"], strict=True)
        devices = {id(tensor): device_at(place, self._world.devices) for tensor, place in places}
        # a copy: the tensors of a loaded checkpoint are mapped from its files, which retention removes
        self._load(copy_tensors(entry["state"], lambda tensor: tensor.to(devices[id(tensor)], copy=True)))

    def snapshot(self) -> Any:
        """Return a copy of this rank's state, its tensors on their own devices; None if the task has none."""
        if not self._exists:
            return None
        return copy_tensors(self._state(), lambda tensor: tensor.detach().clone())

    def restore_snapshot(self, snapshot: Any) -> None:
        """Restore a result of `snapshot`."""
        if snapshot is not None:
            self._load(snapshot)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state after the passes in the context."""
        before = self.snapshot()
        try:
            yield
        finally:
            self.restore_snapshot(before)

    def _copy(self) -> dict[str, Any]:
        state = self._state()
        if not isinstance(state, Mapping):
            raise TaskError(f"{self._name}.state_dict must return a dict, but it returned a {type(state).__name__}")
        plain = plain_copy(state, f"{self._name}.state_dict()")
        places = [place_of(tensor.device, self._world.devices) for tensor in iterate_tensors(state)]
        return {"state": plain, "places": places}

    def _state(self) -> Any:
        state = self._task.state_dict()
        if not self._inherits:
            # a task may return its attributes, among them what the trainer gave it
            if isinstance(state, dict) and any(isinstance(value, SET_BY_TRAINER) for value in state.values()):
                return {name: value for name, value in state.items() if not isinstance(value, SET_BY_TRAINER)}
            return state
        return {name: value for name, value in state.items() if name.rpartition(".")[0] not in self._left_out}

    def _load(self, state: Any) -> None:
        if self._inherits:
            # not strict: the model's own entries are left out
            self._task.load_state_dict(state, strict=False)
        else:
            self._task.load_state_dict(state)


def remember_attributes(task: Task) -> Callable[[], None]:
    """Return a function that undoes changes of the task's numbers and containers, and of containers directly in these.

    Otherwise the first evaluation would count the batches of a trial that failed as well. Containers of more than
    `LARGEST` items stay changed. So do other attributes: an object that is made in the first evaluation, such as a
    hook, would be made twice.
    """
    numbers = {name: value for name, value in vars(task).items() if type(value) in (int, float)}
    outer = _small_containers(vars(task).values())
    items = (value.values() if isinstance(value, dict) else value for value in outer)
    inner = [container for values in items for container in _small_containers(values)]
    contents = [(value, copy(value)) for value in (*outer, *inner)]

    def undo() -> None:
        vars(task).update(numbers)
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list | deque) else value.update(content)

    return undo


def place_of(device: torch.device, devices: Sequence[torch.device]) -> int | None:
    """Return the position of a tensor's device among its rank's devices; None for the CPU."""
    if device.type == "cpu":
        return None
    return devices.index(device) if device in devices else 0


def device_at(place: int | None, devices: Sequence[torch.device]) -> torch.device:
    """Return the device for a result of `place_of`; the last one if this rank has fewer devices."""
    return torch.device("cpu") if place is None else devices[min(place, len(devices) - 1)]


def _small_containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if type(value) in CONTAINERS and len(value) <= LARGEST]


def copy_tensors(state: Any, duplicate: Callable[[Tensor], Tensor]) -> Any:
    """Copy each tensor once, so that a tensor with two names stays one."""
    copies: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = duplicate(tensor)
        return copies[id(tensor)]

    return map_tensors(once, state)
