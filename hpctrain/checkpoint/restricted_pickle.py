"""Unpickle without executing anything: tensors are rebuilt, and every other object becomes a placeholder."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import _utils as rebuild

# torch 2.14 checks sparse tensors even with check_sparse_tensor_invariants(False), and warns that it takes time
warnings.filterwarnings("ignore", "Validating sparse tensor invariants")

BUILTINS = ("builtins", "__builtin__")
"""Module of Python's own types, in pickles of Python 3 and of protocol 2."""


class UnknownObject:
    """An object of a class that isn't known here: what its pickle says about it.

    Attributes:
        made_by: full name of the class or function.
        arguments: with which it was made.
        state: its attributes, as its class saved them.
        items: its elements, if it is a list of a kind.
        entries: its entries, if it is a dictionary of a kind.
    """

    made_by = ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = (*arguments, *options.values())
        self.state: Any = None
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def append(self, item: Any) -> None:
        """Add an element; unpickling calls it."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Add elements; unpickling calls it."""
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def __repr__(self) -> str:
        # as the key of a dictionary, it is part of a tensor's name, which has to be the same in both saves
        return f"{self.made_by}({', '.join(map(repr, self.arguments))})"

    def get(self, name: str) -> Any:
        """Return an attribute; None without it."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def _rebuild_from_type(function: Any, cls: Any, arguments: Any, state: Any) -> Any:  # noqa: ARG001 - torch's signature
    """Rebuild a tensor with attributes, or of a subclass, as a plain one, and a DTensor as a placeholder."""
    tensor = _call(function, arguments)
    if isinstance(tensor, UnknownObject):
        tensor.state = state
    return tensor


def _rebuild_parameter(data: Any, *options: Any) -> Any:
    make: Callable[..., Any] = rebuild._rebuild_parameter
    # of a subclass such as DTensor
    return data if isinstance(data, UnknownObject) else make(data, *options)


def _bytearray(data: Any = b"", *_: Any) -> Any:
    if isinstance(data, int):
        raise pickle.UnpicklingError(f"allocates {data} bytes")
    return bytearray(data.encode("latin1") if isinstance(data, str) else data)


def _load_from_bytes(data: bytes) -> Any:
    return load(io.BytesIO(data))


# each of these only makes tensors or containers from its arguments
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": lambda text, encoding="latin1": text.encode("latin1") if encoding == "latin1" else text,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": lambda *_: defaultdict(dict),
    "collections.deque": deque,
    "torch.Size": torch.Size,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_qtensor": rebuild._rebuild_qtensor,
    "torch._utils._rebuild_sparse_tensor": rebuild._rebuild_sparse_tensor,
    "torch._utils._rebuild_tensor": rebuild._rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild._rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": rebuild._rebuild_tensor_v3,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.storage._load_from_bytes": _load_from_bytes,
    **{f"{module}.{kind.__name__}": kind for module in BUILTINS for kind in (set, frozenset, complex)},
    **{f"{module}.bytearray": _bytearray for module in BUILTINS},
}
_CALLABLE = frozenset(_FUNCTIONS.values())


def _call(function: Any, arguments: Any) -> Any:
    if isinstance(function, type) and issubclass(function, UnknownObject):
        return function(*arguments)
    if isinstance(function, UnknownObject):  # the result of something that wasn't called
        return UnknownObject(function, *arguments)
    if function not in _CALLABLE:
        raise pickle.UnpicklingError(f"calls {function!r}")
    return function(*arguments)


# The implementation in Python, whose instructions can be replaced one by one; the tensors' data isn't in the pickle, so
# its speed doesn't matter.
class RestrictedUnpickler(pickle._Unpickler):
    """Reads a pickle, and calls nothing but the functions that rebuild tensors and containers."""

    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return the function, type or constant of that name, or a subclass of `UnknownObject` for it."""
        module = module.replace("pathlib._local", "pathlib")  # the name in Python 3.13
        full_name = f"{module}.{name}"
        if full_name in _FUNCTIONS:
            return _FUNCTIONS[full_name]
        # not getattr, for which torch imports modules
        constant = vars(torch).get(name) if module == "torch" else None
        if isinstance(constant, torch.dtype | torch.layout | torch.qscheme):
            return constant
        return type(name, (UnknownObject,), {"made_by": full_name})

    def get_extension(self, code: int) -> None:
        """Refuse `copyreg`'s codes, which stand for objects of this process."""
        raise pickle.UnpicklingError(f"has extension code {code}")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _call(self.stack[-1], arguments)

    def _new_with_options(self) -> None:
        options = self.stack.pop()
        arguments = self.stack.pop()
        self.stack[-1] = _call(self.stack[-1], (*arguments, *options.values()))

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], UnknownObject):
            self.stack[-1].state = state

    def _instantiate(self, function: Any, arguments: Any) -> None:
        self.append(_call(function, arguments))

    def _read_bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        # Python's allocates what the pickle claims
        self.append(bytearray(self.read(size)))

    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.NEWOBJ_EX[0]] = _new_with_options
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.BYTEARRAY8[0]] = _read_bytearray


def load_plain(file: IO[bytes], **options: Any) -> Any:
    """Read a pickle that `torch.save` didn't write.

    Args:
        file: with the pickle.
        options: of `pickle.load`.

    Raises:
        Exception: of any kind, if it isn't a pickle that can be read.
    """
    return RestrictedUnpickler(file, **options).load()


class _PickleModule:
    """The part of the module `pickle` that `torch.load` uses."""

    __name__ = "restricted_pickle"
    Unpickler = RestrictedUnpickler
    UnpicklingError = pickle.UnpicklingError

    load = staticmethod(load_plain)


def load(source: Path | IO[bytes]) -> Any:
    """Read what `torch.save` wrote; tensors are on the CPU, and mapped from the file where that is possible.

    Raises:
        Exception: of any kind, if it can't be read.
    """
    mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
    # torch 2.11 warns about unchecked sparse tensors unless this is set; nothing here uses their indices
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError:
            # never for a TorchScript program, which torch.load would execute: with weights_only, that is another error
            if not isinstance(source, Path):
                source.seek(0)
            return torch.load(
                source, map_location="cpu", weights_only=False, mmap=mapped, pickle_module=_PickleModule()
            )
