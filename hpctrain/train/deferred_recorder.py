"""Operators that make tensors without data, and are recorded, while a model is being built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.train.deferred_record import Record
from hpctrain.train.deferred_tape import Draw, Operation, RecordedTensor, Tape, new_storage

CPU = torch.device("cpu")
META = torch.device("meta")

_FILLING_AT_RANDOM = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
}  # fmt: skip
_FILLING = {"copy_", "fill_", "zero_"} | _FILLING_AT_RANDOM
"""Operators whose result doesn't depend on what their first argument contains."""

_WRITTEN_UNSAID = {"aten::native_batch_norm": ("running_mean", "running_var")}
"""Arguments that an operator changes, although its schema doesn't say so."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Inside this context, operators that make a tensor on the CPU, or use one made so, are recorded instead.

    Their results are on the meta device: they have no data. Operators on other tensors run as they are. Random numbers
    are drawn at once all the same, and dropped, so that the generator and what else draws from it are as ever. If the
    code needs a value, or an operator has no kernel for the meta device, its arguments are computed there and then.

    Args:
        tape: gets the operations.
        record: computes values.
    """

    def __init__(self, tape: Tape, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._tape = tape
        self._record = record
        self._scratch = new_storage(0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # the wrapper that it stands for imports torch's compiler at the first call
        return False

    def values(self, tensor: Tensor) -> Tensor:
        """Compute the present values of a tensor; return one that has data as it is."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return self._record.materialise(tensor) if self._tape.holds(tensor) else tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record a call of an operator, or run it."""
        # the properties of tensors have to be the true ones here
        with torch._C.DisableTorchFunction():
            call = _Call(func, args, kwargs or {})
            for tensor in call.tensors:
                if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                    # it would use its inner tensors unseen
                    self._tape.refuse(f"{func} has an argument of the class {type(tensor).__name__}")
            if any(self._tape.holds(tensor) for tensor in call.tensors):
                self._check(call)
                return self._defer(call)
            if call.makes_tensor and all(device in {CPU, META} for device in call.devices):
                return self._defer(call)
            return self._run(call)

    def _check(self, call: _Call) -> None:
        """Refuse arguments that can't be together with tensors of the tape."""
        for tensor in call.tensors:
            if tensor.is_meta and not self._tape.holds(tensor):
                self._tape.refuse(f"{call.operator} has an argument on the meta device that wasn't recorded")
        for device in [*call.devices, *(tensor.device for tensor in call.tensors)]:
            if device.type not in {"cpu", "meta"}:
                self._tape.refuse(f"{call.operator} involves the device {device}")
        if any(isinstance(leaf, torch.UntypedStorage | torch.TypedStorage) for leaf in call.leaves):
            self._tape.refuse(f"{call.operator} has a storage as an argument")

    def _run(self, call: _Call) -> Any:
        """Run an operator that concerns no recorded tensor."""
        for tensor in call.written:
            self._tape.protect(tensor)
        if call.tensors and not any(tensor.is_meta for tensor in call.tensors):
            # torch itself, in C++, moves an argument to the device of a recorded tensor
            return call.run(_on_cpu)
        return call.run()

    def _defer(self, call: _Call) -> Any:
        if call.name == "set_":
            return self._rebind(call)
        holds_written = [self._tape.holds(tensor) for tensor in call.written]
        if torch.Tag.data_dependent_output in call.operator.tags or not all(holds_written):
            return self._compute(call)
        arguments, keywords = call.mapped(self._source)
        # before the call, which may change the view
        replaced = self._replaced(call)
        try:
            result = self._on_meta(call)
        except NotImplementedError:
            return self._compute(call)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not call.tensors and not any(tensor.numel() for tensor in results):
            # an empty tensor may get data from a file
            return call.run(_on_cpu)
        draw = self._draw(call) if torch.Tag.nondeterministic_seeded in call.operator.tags else None
        outputs = tuple(self._tape.adopt(tensor) for tensor in results)
        sources = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, RecordedTensor)]
        written = {tensor.untyped_storage()._cdata for tensor in call.written}
        writes = written.union(output.storage for output in outputs if output is not None)
        if writes:
            self._tape.add(
                Operation(
                    operator=call.operator,
                    arguments=arguments,
                    keywords=keywords,
                    outputs=outputs,
                    reads=frozenset({source.storage for source in sources} - replaced),
                    writes=frozenset(writes),
                    default_dtype=torch.get_default_dtype(),
                    draw=draw,
                )
            )
        return result

    def _rebind(self, call: _Call) -> Any:
        """Give a tensor the storage of another one."""
        if not all(self._tape.holds(tensor) for tensor in call.tensors):
            self._tape.refuse(f"{call.operator} mixes tensors with and without data")
        return call.run()

    def _source(self, leaf: Any) -> Any:
        return self._tape.source(leaf) if isinstance(leaf, Tensor) else _on_cpu(leaf)

    def _replaced(self, call: _Call) -> set[int]:
        """Storages that get new content throughout, whatever the old one was."""
        if call.name not in _FILLING:
            return set()
        target = RecordedTensor.of(call.arguments[0])
        return {target.storage} if target.covers(self._tape.size_bytes(target.storage)) else set()

    def _on_meta(self, call: _Call) -> Any:
        if call.name in _FILLING_AT_RANDOM:
            # for some of them, torch imports its compiler
            return call.arguments[0]
        return call.run(self._without_data)

    def _without_data(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return None
        if isinstance(leaf, torch.device):
            return META
        if isinstance(leaf, Tensor) and not self._tape.holds(leaf):
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)
        return leaf

    def _draw(self, call: _Call) -> Draw:
        """Draw random numbers as the operator would, and drop them."""
        found = [leaf for leaf in call.leaves if isinstance(leaf, torch.Generator)]
        generator = found[0] if found else torch.default_generator
        state = generator.get_state()
        if call.name not in _FILLING:
            call.run(self._with_data)
            if call.written:
                # live storages have the result already
                self._record.forget()
            return Draw(generator, state)
        filled: Tensor = call.arguments[0]
        scratch = self._scratch_like(filled)
        if not self._record.has_live(filled):
            # otherwise two large tensors could be in memory
            self._record.forget()
        call.run(lambda leaf: scratch if leaf is filled else self._with_data(leaf))
        return Draw(generator, state)

    def _scratch_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor with memory that the next draw uses again."""
        layout = replace(RecordedTensor.of(tensor), offset=0)
        if self._scratch.nbytes() < layout.span_bytes:
            # the old one is dropped before the new one is allocated
            self._scratch = new_storage(0)
            self._scratch = new_storage(layout.span_bytes)
        return layout.view(self._scratch)

    def _compute(self, call: _Call) -> Any:
        """Run an operator with the present values of its arguments."""
        for tensor in call.written:
            if self._tape.holds(tensor):
                self._tape.refuse(f"{call.operator} can't be recorded")
            self._tape.protect(tensor)
        return call.run(self._with_data)

    def _with_data(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and self._tape.holds(leaf):
            return self._record.materialise(leaf)
        return _on_cpu(leaf)


class _Call:
    """A call of an operator; the tensors, devices and so on among its arguments are its leaves."""

    def __init__(self, operator: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self.operator = operator
        self.arguments = arguments
        self.keywords = keywords
        self.leaves = tree_leaves((arguments, keywords))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.devices = [leaf for leaf in self.leaves if isinstance(leaf, torch.device)]

    @cached_property
    def name(self) -> str:
        """The operator's name, without the overload's."""
        return str(self.operator._schema.name).rpartition("::")[2]

    @property
    def makes_tensor(self) -> bool:
        """Whether it makes a tensor of no other tensor."""
        returns = self.operator._schema.returns
        return not self.tensors and bool(returns) and str(returns[0].type) in {"Tensor", "List[Tensor]"}

    @cached_property
    def written(self) -> list[Tensor]:
        """Tensors that it changes."""
        found = [
            self.arguments[place] if place < len(self.arguments) else self.keywords.get(name)
            for place, name in _written_places(self.operator)
        ]
        return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]

    def mapped(self, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords with a function applied to each leaf."""
        arguments, keywords = tree_map(function, (self.arguments, dict(self.keywords)))
        return arguments, keywords

    def run(self, function: Callable[[Any], Any] | None = None) -> Any:
        """Call the operator, after applying a function to each leaf."""
        arguments, keywords = (self.arguments, self.keywords) if function is None else self.mapped(function)
        return self.operator(*arguments, **keywords)


@cache
def _written_places(operator: Any) -> list[tuple[int, str]]:
    hidden = _WRITTEN_UNSAID.get(operator._schema.name, ())
    return [
        (place, one.name)
        for place, one in enumerate(operator._schema.arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or one.name in hidden
    ]


def _on_cpu(leaf: Any) -> Any:
    return CPU if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf
