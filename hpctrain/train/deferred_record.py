"""The record of a model's deferred building, which computes each tensor of the model when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.train.deferred_tape import (
    Constant,
    DeferredBuildError,
    Draw,
    Operation,
    RecordedTensor,
    Source,
    Tape,
    new_storage,
)


class Record:
    """Runs recorded operations again, and only those on which the tensor that is asked for depends.

    A request needs memory for the storages that these operations concern: for a tensor that is initialised in place,
    only its own. They stay alive until the next request, which continues from them where it can, so ask for the names
    of a group of `in_groups` one after the other, and drop a result before asking for the next one.

    Values are equal bit for bit to those of an ordinary build: operations run again on the CPU, in their order, and
    draw from a generator in the state that it had. Afterwards the generator has its own state again.

    Args:
        tape: the operations; between requests, a build that isn't over may add some.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        # an error in place of a storage whose views on the meta device don't fit it
        self._live: dict[int, torch.UntypedStorage | DeferredBuildError] = {}
        # of live storages: index of the last operation on their content
        self._positions: dict[int, int] = {}
        self._model_storages: set[int] = set()

    def sources(self, model: nn.Module) -> dict[str, Source]:
        """Describe the parameters and buffers of a model; call it before anything replaces them.

        Returns:
            By name; a tensor that several modules share has several names.

        Raises:
            DeferredBuildError: one has no values, because the model put it on the meta device itself.
        """
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        found = {name: self._source(name, tensor) for name, tensor in named}
        self._model_storages |= {source.storage for source in found.values() if isinstance(source, RecordedTensor)}
        return found

    def values(self, source: Source) -> Tensor:
        """Return the values, on the CPU, of what `sources` described; don't modify them.

        Raises:
            DeferredBuildError: an operation has another result than it promised on the meta device.
        """
        if isinstance(source, Constant):
            return source.tensor
        self._bring(source.storage)
        return self._view(source)

    def materialise(self, tensor: Tensor) -> Tensor:
        """Return the values, on the CPU, of a tensor that the build made; don't modify them.

        Raises:
            DeferredBuildError: as for `sources` and `values`.
        """
        return self.values(self._source("the tensor", tensor))

    def in_groups(self, sources: Mapping[str, Source]) -> Iterator[list[str]]:
        """Group the names whose values depend on the same operations; names and groups are in the mapping's order."""
        parents: dict[object, object] = {}

        def root(one: object) -> object:
            while (parent := parents.setdefault(one, one)) != one:
                parents[one] = one = parents[parent]
            return one

        for name, source in sources.items():
            if isinstance(source, RecordedTensor):
                for index in self._plan(source.storage, {}) or []:
                    parents[root(index)] = root(name)
        groups: dict[object, list[str]] = {}
        for name in sources:
            groups.setdefault(root(name), []).append(name)
        yield from groups.values()

    def has_live(self, tensor: Tensor) -> bool:
        """Whether the last request left the storage of this tensor in memory."""
        return RecordedTensor.of(tensor).storage in self._live

    def forget(self) -> None:
        """Drop the storages of the last request."""
        self._live.clear()
        self._positions.clear()

    def _source(self, name: str, tensor: Tensor) -> Source:
        if self._tape.holds(tensor):
            return RecordedTensor.of(tensor)
        if tensor.is_meta:
            raise DeferredBuildError(f"{name} is on the meta device, and no recorded operation made it")
        return Constant(tensor.detach())

    def _bring(self, target: int) -> None:
        """Give a storage the content that the operations so far give it."""
        plan = self._plan(target, self._positions)
        if plan is None:
            self.forget()
            plan = self._plan(target, {}) or []
        operations = [(index, self._tape.operations[index]) for index in plan]
        needed = {target}.union(*(operation.storages for _, operation in operations))
        for storage in self._live.keys() - needed:
            self._drop(storage)
        try:
            for index, operation in operations:
                self._run(operation)
                self._positions |= dict.fromkeys(operation.writes, index)
                self._drop_unused(operation.storages - {target}, index)
        except BaseException:
            self.forget()
            raise

    def _drop_unused(self, storages: Set[int], index: int) -> None:
        """Drop those that the model doesn't contain, and that no operation after this one concerns."""
        if self._tape.is_complete:
            for storage in storages - self._model_storages:
                if self._tape.last_use(storage) == index:
                    self._drop(storage)

    def _plan(self, target: int, positions: Mapping[int, int]) -> list[int] | None:
        """Choose the operations on which the content of a storage depends, beyond those that live storages contain.

        Returns:
            Their indices in order; None if a live storage contains later operations than one of them needs.
        """
        chosen: set[int] = set()
        wanted = [(target, len(self._tape.operations))]
        while wanted:
            storage, before = wanted.pop()
            after = positions.get(storage, -1)
            if after >= before:
                return None
            for index in self._tape.writers(storage, before=before, after=after):
                if index in chosen:
                    break
                chosen.add(index)
                operation = self._tape.operations[index]
                # others that this operation writes are written again
                if any(positions.get(other, -1) >= index for other in operation.writes):
                    return None
                wanted += [(other, index) for other in operation.reads if other != storage]
                if storage not in operation.reads:
                    break
        return sorted(chosen)

    def _run(self, operation: Operation) -> None:
        arguments, keywords = tree_map(self._real, (operation.arguments, operation.keywords))
        with torch.no_grad(), _default_dtype(operation.default_dtype), _drawing(operation.draw):
            returned = operation.operator(*arguments, **keywords)
        results = [one for one in tree_leaves(returned) if isinstance(one, Tensor)]
        for result, output in zip(results, operation.outputs, strict=True):
            if output is not None and (result.size(), result.dtype) == (output.size, output.dtype):
                self._live[output.storage] = self._fitting(result, output)
            elif output is not None:
                # most often nobody asks for it: an unused statistic, for one
                self._live[output.storage] = DeferredBuildError(
                    f"{operation.operator}: expected {output.dtype} of size {output.size}, as on the meta device, "
                    f"got {result.dtype} of size {tuple(result.size())}"
                )

    def _real(self, argument: Any) -> Any:
        if isinstance(argument, Constant):
            return argument.tensor
        if not isinstance(argument, RecordedTensor):
            return argument
        if argument.storage not in self._live:
            # what made it isn't in the plan: this operation replaces its content
            self._live[argument.storage] = new_storage(self._tape.size_bytes(argument.storage))
        return self._view(argument)

    def _view(self, tensor: RecordedTensor) -> Tensor:
        storage = self._live[tensor.storage]
        if isinstance(storage, DeferredBuildError):
            raise storage
        return tensor.view(storage)

    def _fitting(self, result: Tensor, output: RecordedTensor) -> torch.UntypedStorage:
        """Return the storage of a result, or a copy, in which later views of the meta device's result have places."""
        storage, size_bytes = result.untyped_storage(), self._tape.size_bytes(output.storage)
        is_alike = result.stride() == output.stride and result.storage_offset() == output.offset
        if is_alike and storage.nbytes() >= size_bytes:
            return storage
        storage = new_storage(size_bytes)
        output.view(storage).copy_(result)
        return storage

    def _drop(self, storage: int) -> None:
        self._live.pop(storage, None)
        self._positions.pop(storage, None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _drawing(draw: Draw | None) -> Iterator[None]:
    """Inside the context, the generator of a draw has the state that it had; afterwards its own again."""
    if draw is None:
        yield
        return
    before = draw.generator.get_state()
    draw.generator.set_state(draw.state)
    try:
        yield
    finally:
        draw.generator.set_state(before)
