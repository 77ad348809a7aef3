"""Passes of a model that leave no trace: buffers, modes, random states and frozen parameters are restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hpctrain.rank.determinism import random_states_restored
from hpctrain.rank.world import World


@contextmanager
def attribute_restored(objects: Iterable[object], name: str) -> Iterator[None]:
    """Restore an attribute of each object after the context: `training` of modules, `requires_grad` of parameters."""
    values = [(owner, getattr(owner, name)) for owner in objects]
    try:
        yield
    finally:
        for owner, value in values:
            setattr(owner, name, value)


@contextmanager
def buffers_and_rng_restored(model: nn.Module, world: World) -> Iterator[None]:
    """Restore the model's buffers and modes, and the global random states, after the passes in the context.

    These are the random states of torch on the CPU and on the rank's GPUs, of NumPy and of Python.
    """
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    saved = [
        (buffer, buffer.detach().clone()) for _, slots in buffers for buffer in slots.values() if buffer is not None
    ]
    try:
        with attribute_restored(model.modules(), "training"), random_states_restored(world.gpus):
            yield
    finally:
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)
            for module, slots in buffers:
                # the forward pass may have put other tensors in their places, even of another shape, or added some
                for name in module._buffers.keys() - slots.keys():
                    delattr(module, name)
                module._buffers.update(slots)


@contextmanager
def training_pass_undone(model: nn.Module, world: World, *, compiled: bool) -> Iterator[None]:
    """Do as `buffers_and_rng_restored`, and restore the parameters that require no gradient when the context begins.

    Args:
        model: that the passes go through.
        world: the ranks.
        compiled: as `FrozenParametersRestored` takes it.
    """
    with FrozenParametersRestored(model, compiled=compiled), buffers_and_rng_restored(model, world):
        yield


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Base of modes that see each operator as it runs; they don't see those inside of compiled code."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # with True, torch wraps the handler for its compiler, and imports the compiler for it: more than a second
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile as it would without this mode."""
        return True


class FrozenParametersRestored(OperatorMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Context manager that restores the parameters that require no gradient when it is made.

    It copies on write: copies of all of them would be as large as the whole model where only an adapter is trained,
    once per rank and on all ranks of a node at the same time. Hardly any loss writes to a frozen parameter.

    Args:
        model: any module.
        compiled: whether the passes run compiled code, which doesn't show what it writes to: all of these parameters
            are then copied to the host's memory at once. Otherwise, only those are that an operator of torch writes to,
            right before it does; what a kernel called without torch writes isn't restored.
    """

    def __init__(self, model: nn.Module, *, compiled: bool) -> None:
        super().__init__()
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        # the second one keeps the memory of a parameter whose `data` the pass replaces
        self._parameters = [(parameter, parameter.detach()) for parameter in frozen]
        self._copies: dict[int, Tensor] = {}
        self._by_storage: dict[int, list[int]] = defaultdict(list)
        self._write_arguments: dict[Any, tuple[tuple[int, str], ...]] = {}
        for index, (_, values) in enumerate(self._parameters):
            # the memory of such tensors isn't a single storage
            opaque = values.layout is not torch.strided or is_traceable_wrapper_subclass(values)
            if compiled or opaque:
                self._copy(index)
            else:
                self._by_storage[_storage(values)].append(index)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy what an operator is about to write to, and run it."""
        kwargs = kwargs or {}
        if self._by_storage:
            for tensor in self._outputs(func, args, kwargs):
                for index in self._by_storage.pop(_storage(tensor), ()):
                    self._copy(index)
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        """Give the parameters their memory and values of the beginning."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with torch.no_grad():
            for parameter, values in self._parameters:
                if parameter.dtype != values.dtype or not values.is_set_to(parameter):
                    parameter.data = values
            for index, copy in self._copies.items():
                self._parameters[index][1].copy_(copy)

    def _copy(self, index: int) -> None:
        # copies on the device could exceed its memory; the host had room for the whole model when it was built
        self._copies[index] = self._parameters[index][1].to("cpu", copy=True)

    def _outputs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors with memory that an operator writes to."""
        if func not in self._write_arguments:
            self._write_arguments[func] = _written_arguments(func)
        values = [args[place] if place < len(args) else kwargs.get(name) for place, name in self._write_arguments[func]]
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)) if values else ()
        return [tensor for tensor in tensors if tensor.layout is torch.strided]


def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operator over functions, as torch.cond
        return ()
    # the schemas of collectives don't say what they write to
    collective = func.namespace == "c10d"
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if collective or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def _storage(tensor: Tensor) -> int:
    # of the storage object: that of its memory is 0 for every empty tensor
    address: int = tensor.untyped_storage()._cdata
    return address
