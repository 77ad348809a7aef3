"""Build a model without its data, and compute its tensors one after the other.

The idea is that of torchdistX's deferred initialisation (https://github.com/pytorch/torchdistx).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hpctrain.train.deferred_record import Record
from hpctrain.train.deferred_recorder import CPU, META, Recorder
from hpctrain.train.deferred_tape import DeferredBuildError, Tape


@contextmanager
def deferred() -> Iterator[Record]:
    """Inside the context, tensors that would be made on the CPU are made on the meta device, and recorded.

    The code in it sees tensors that claim to be on the CPU, and the values that it asks for. The random number
    generators advance as in an ordinary build. Tensors made from data (`torch.tensor`, `torch.from_numpy`, a file) have
    data. If one of more than `COPIED_BYTES` is an argument of a recorded operation, NumPy mustn't change it before the
    values are computed; torch may, inside the context.

    Yields:
        The record, which computes the values of the tensors afterwards.

    Raises:
        DeferredBuildError: the building can't be deferred, or failed for any other reason, which is the cause. An
            ordinary build shows whether the reason is the model's own; the caller resets the generators before it.
    """
    tape = Tape()
    record = Record(tape)
    recorder = Recorder(tape, record)
    try:
        with recorder, _Disguise(tape, recorder):
            yield record
    except DeferredBuildError:
        raise
    except Exception as error:
        raise DeferredBuildError(f"{type(error).__name__}: {error}") from error
    finally:
        record.forget()
        tape.is_complete = True
    if tape.refusal is not None:
        raise tape.refusal


def materialise_module(model: nn.Module, record: Record, place: Callable[[str, Tensor], Tensor]) -> None:
    """Give the model its parameters and buffers; one that modules share stays one.

    Args:
        model: built inside of `deferred`.
        record: of that build.
        place: returns what is kept of a tensor, given its first name and its values on the CPU, which it doesn't
            modify. Besides what it keeps, the values of one group of `Record.in_groups` at most are in memory.
    """
    sources = record.sources(model)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    placed: dict[int, Tensor] = {}
    for names in record.in_groups(sources):
        for name in names:
            tensor = tensors[name]
            if id(tensor) not in placed:
                placed[id(tensor)] = _like(tensor, place(name, record.values(sources[name])))
            path, _, attribute = name.rpartition(".")
            # not into the module's dicts: an RNN has its weights in a list, too
            setattr(model.get_submodule(path), attribute, placed[id(tensor)])
    record.forget()


def _like(tensor: Tensor, kept: Tensor) -> Tensor:
    """Return a tensor as a parameter or buffer with the attributes of the one that it replaces."""
    if isinstance(tensor, nn.Parameter):
        kept = nn.Parameter(kept.detach(), requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        setattr(kept, name, value)
    return kept


class _Disguise(TorchFunctionMode):
    """Inside this context, a recorded tensor claims to be on the CPU, and what needs its data gets them.

    Code that skips what is on the meta device would build another model otherwise, `torch.nn.init.trunc_normal_` for
    one.
    """

    def __init__(self, tape: Tape, recorder: Recorder) -> None:
        super().__init__()
        self._tape = tape
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or what stands for it."""
        keywords = dict(kwargs or {})
        if torch.is_autocast_enabled("cpu") and any(map(self._holds, tree_leaves((args, keywords)))):
            # it would leave a tensor on the meta device in its type
            self._tape.refuse(f"{func.__name__} in autocast can't be recorded")
        if self._is_computed_now(func, args, keywords):
            return self._computed(func, args, keywords)
        if args and self._holds(args[0]):
            if func in _CLAIMS:
                return _CLAIMS[func]
            func, args, keywords = self._adapted(func, args, keywords)
        elif any(_is_meta(device) for device in [keywords.get("device"), *(args if func in _MOVES else ())]):
            # what the model puts on the meta device has no values in an ordinary build, either
            with torch._C._DisableTorchDispatch():
                return func(*args, **keywords)
        return func(*args, **keywords)

    def _is_computed_now(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        if func in _TAKES_DATA:
            return _has_tensors(args[0]) if args else False
        is_nuclear = func in _NORMS and "nuc" in (keywords.get("p"), *args[1:2])
        return is_nuclear or func in _CHOOSES_KERNEL

    def _adapted(
        self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the call that stands for one with a recorded tensor as its first argument."""
        tensor, *rest = args
        if func in _REFUSED:
            self._tape.refuse(f"{func.__name__} can't be recorded")
        if func in _READS:
            tensor = self._recorder.values(tensor)
        elif func in _MAKES_ALIKE or (func is Tensor.type and not rest):
            tensor = torch.empty(0, dtype=tensor.dtype, device=CPU)
        elif func in _INDEXES:
            rest[0] = _with_data(rest[0])
        elif func in _MOVES or _is_meta(keywords.get("device")):
            if any(_is_meta(one) for one in (*rest, *keywords.values())):
                self._tape.refuse("the model moves a tensor to the meta device")
            # on the device where it seems to be, it stays the same tensor
            rest = [META] if func is Tensor.cpu else [_disguised(target) for target in rest]
            func, keywords = Tensor.to, {name: _disguised(target) for name, target in keywords.items()}
        return func, (tensor, *rest), keywords

    def _computed(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function with values, outside of the dispatch mode, whose presence changes what some functions do."""

        def value(tensor: Tensor) -> Tensor:
            if tensor.requires_grad and torch.is_grad_enabled() and self._tape.holds(tensor):
                self._tape.refuse(f"a gradient through {func.__name__} can't be recorded")
            return self._recorder.values(tensor)

        args, keywords = tree_map_only(Tensor, value, (args, keywords))
        with torch._C._DisableTorchDispatch():
            return func(*args, **keywords)

    def _holds(self, argument: Any) -> bool:
        return isinstance(argument, Tensor) and self._tape.holds(argument)


def _disguised(target: Any) -> Any:
    """Return what moves a recorded tensor to where it seems to be."""
    if isinstance(target, Tensor) and target.device == CPU:
        return target.dtype
    return META if isinstance(target, str | torch.device) and torch.device(target) == CPU else target


def _with_data(index: Any) -> Any:
    """Make tensors of the lists in an index, which torch would make on the meta device, without their numbers."""
    if isinstance(index, tuple):
        return tuple(map(_with_data, index))
    is_flat = isinstance(index, list | range) and all(isinstance(one, int | np.integer) for one in index)
    return torch.tensor(index, device=CPU) if is_flat or isinstance(index, np.ndarray) else index


def _has_tensors(data: Any) -> bool:
    """Whether nested lists begin with a tensor."""
    while isinstance(data, list | tuple) and data:
        data = data[0]
        if isinstance(data, Tensor):
            return True
    return False


def _is_meta(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device) == META


_CLAIMS: dict[Any, Any] = {
    Tensor.device.__get__: CPU,
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.get_device: -1,
}
"""What properties of a recorded tensor claim."""

_READS = {Tensor.tolist, Tensor.__repr__, Tensor.__format__}
"""Functions that get the data without an operator."""

_MAKES_ALIKE = {Tensor.new, Tensor.new_tensor}
"""Functions that make a tensor from data of the caller."""

_MOVES = {Tensor.to, Tensor.cpu}

_INDEXES = {Tensor.__getitem__, Tensor.__setitem__}

_TAKES_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
"""Functions that get the data of tensors in a list without an operator."""

_NORMS = {torch.norm, Tensor.norm}

_CHOOSES_KERNEL = {
    functional.interpolate,
    functional.scaled_dot_product_attention,
    torch.gru,
    torch.linalg.cond,
    torch.linalg.eigvalsh,
    torch.linalg.lstsq,
    torch.linalg.matrix_norm,
    torch.linalg.matrix_rank,
    torch.linalg.multi_dot,
    torch.linalg.norm,
    torch.linalg.svdvals,
    torch.lstm,
    torch.nuclear_norm,
    torch.rnn_relu,
    torch.rnn_tanh,
}
"""Functions that call other operators for the meta device, or in a dispatch mode, so that last bits would differ."""

_REFUSED = {
    # these need the memory, in which the caller could also write
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
    Tensor.data_ptr,
    Tensor.numpy,
    Tensor.pin_memory,
    Tensor.share_memory_,
    Tensor.storage,
    Tensor.untyped_storage,
    # in an ordinary build, the module may have chosen its fast path
    functional.multi_head_attention_forward,
}
