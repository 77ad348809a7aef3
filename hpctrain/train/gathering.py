"""Per-sample values of an evaluation, brought to rank zero in the order of the dataset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpctrain.distributed.world import World
from hpctrain.errors import TaskError
from hpctrain.phrases import listed

Values: TypeAlias = Tensor | list[Tensor]
"""Of a batch or of all samples: a tensor of shape [n, ...], or n tensors."""


@dataclass(slots=True)
class _Column:
    """The values of one name on this rank.

    Attributes:
        ragged: whether each sample has a tensor of its own.
        dtype: of all of them.
        shape: of a sample; None if they are ragged.
        ndim: number of dimensions of a sample.
        parts: of shape [n, ...], a batch each; or a sample each.
    """

    ragged: bool
    dtype: torch.dtype
    shape: list[int] | None
    ndim: int
    parts: list[Tensor] = field(default_factory=list)


class Gathering:
    """The per-sample values of one evaluation.

    Each rank keeps its own in host memory. A copy from a GPU is awaited when the next batch has been computed.

    Args:
        method: that returns them, for messages.
        world: the ranks.

    Attributes:
        num_bytes: of this rank's values so far.
    """

    def __init__(self, method: str, world: World) -> None:
        self.num_bytes = 0
        self._method = method
        self._world = world
        self._columns: dict[str, _Column] = {}
        self._is_empty = True
        self._rounds: list[int] = []
        self._counts: list[int] = []
        self._pending: list[tuple[_Column, Tensor]] = []
        self._copied: torch.cuda.Event | None = None

    def add(self, round_index: int, num_samples: int, found: Mapping[str, Values]) -> None:
        """Keep the values of a batch; not collective.

        Args:
            round_index: which round of the evaluation it is, from 0.
            num_samples: of the batch.
            found: one value for each of them.

        Raises:
            TaskError: names, types or shapes differ from those of earlier batches.
        """
        if self._is_empty:
            self._is_empty = False
            self._columns = {name: _column(values) for name, values in found.items()}
        elif found.keys() != self._columns.keys():
            first, here = (listed(sorted(names)) or "none" for names in (self._columns, found))
            raise TaskError(f"{self._method} must return the same PerSample for every batch: {first}, and later {here}")
        self._settle()
        if not found:
            return
        self._rounds.append(round_index)
        self._counts.append(num_samples)
        for name, values in found.items():
            column = self._columns[name]
            self._require_like(name, column, values)
            for tensor in values if isinstance(values, list) else [values]:
                self.num_bytes += tensor.numel() * tensor.element_size()
                # a copy: of a view, it would otherwise keep the whole; and the task may write into its own
                self._pending.append((column, tensor.detach().to("cpu", non_blocking=True, copy=True)))
        if self._world.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _settle(self) -> None:
        """Wait for the copies of the last batch."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()
        for column, tensor in self._pending:
            # a copy from a GPU is in pinned memory, which torch would keep for ever
            column.parts.append(tensor if copied is None else tensor.clone())
        self._pending = []

    def _require_like(self, name: str, column: _Column, values: Values) -> None:
        found = _column(values)
        if found.ragged is not column.ragged or (column.shape is not None and found.shape != column.shape):
            before = "tensors" if column.ragged else f"shape {column.shape}"
            now = "tensors" if found.ragged else f"shape {found.shape}"
            raise TaskError(
                f"{self._method}: samples of PerSample {name!r} have {before}, and later {now}: "
                "return a list of tensors where shapes differ"
            )
        for tensor in values if isinstance(values, list) else [values]:
            if (tensor.dtype, tensor.ndim) != (column.dtype, column.ndim):
                raise TaskError(
                    f"{self._method}: samples of PerSample {name!r} have {column.dtype} with {column.ndim} dimensions, "
                    f"and later {tensor.dtype} with {tensor.ndim}"
                )

    def gather(self, *, interleaved: bool) -> dict[str, Values] | None:
        """All values at rank zero, in the order of the dataset; None on the other ranks; collective.

        Args:
            interleaved: whether batches follow each other in the dataset by round and then by rank, instead of the
                other way round.

        Raises:
            TaskError: the values of two ranks have other names, types or shapes.
        """
        self._settle()
        heads = self._world.gather(self._head())
        plan: dict[str, Any] = {"names": [], "problem": ""}
        if heads is not None:
            heads = [head if head["counts"].numel() else None for head in heads]
            plan = _plan(heads)
        plan = self._world.broadcast(plan)
        if plan["problem"]:
            raise TaskError(f"{self._method}: {plan['problem']}")
        gathered: dict[str, Values] = {}
        for name in plan["names"]:
            received = self._world.gather_bytes(self._packed(name))
            if received is not None and heads is not None:
                gathered[name] = _in_order(name, heads, received, interleaved=interleaved)
        return None if heads is None else gathered

    def _head(self) -> dict[str, Any]:
        columns = {
            name: {
                "ragged": column.ragged,
                "dtype": str(column.dtype).removeprefix("torch."),
                "shape": column.shape,
                "ndim": column.ndim,
                "sizes": _integers(size for part in column.parts for size in part.shape if column.ragged),
            }
            for name, column in self._columns.items()
        }
        return {"columns": columns, "rounds": _integers(self._rounds), "counts": _integers(self._counts)}

    def _packed(self, name: str) -> Tensor:
        column = self._columns.pop(name, None)
        if column is None or not column.parts:
            return torch.empty(0, dtype=torch.uint8)
        return torch.cat([part.reshape(-1) for part in column.parts]).view(torch.uint8)


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _column(values: Values) -> _Column:
    if isinstance(values, Tensor):
        return _Column(False, values.dtype, list(values.shape[1:]), values.ndim)
    # an evaluation has no empty batches
    first = values[0]
    return _Column(True, first.dtype, None, first.ndim)


def _plan(heads: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Rank zero's decision: the names of what is gathered, or a problem."""
    known = [(rank, head["columns"]) for rank, head in enumerate(heads) if head is not None]
    if not known:
        return {"names": [], "problem": ""}
    first, columns = known[0]
    for rank, other in known[1:]:
        if other.keys() != columns.keys():
            return {"problem": f"ranks {first} and {rank} return PerSample under different names", "names": []}
        for name, column in columns.items():
            for key in ("ragged", "dtype", "shape", "ndim"):
                if other[name][key] != column[key]:
                    found = f"{key}={column[key]} on rank {first} and {key}={other[name][key]} on rank {rank}"
                    return {"problem": f"PerSample {name!r} has {found}", "names": []}
    return {"names": sorted(columns), "problem": ""}


def _in_order(name: str, heads: list[dict[str, Any] | None], received: list[Tensor], *, interleaved: bool) -> Values:
    batches: list[tuple[tuple[int, int], Values]] = []
    for rank, (head, data) in enumerate(zip(heads, received, strict=True)):
        if head is None:
            continue
        values = _unpacked(head["columns"][name], data, int(head["counts"].sum()))
        begin = 0
        for round_index, count in zip(head["rounds"].tolist(), head["counts"].tolist(), strict=True):
            place = (round_index, rank) if interleaved else (rank, round_index)
            batches.append((place, values[begin : begin + count]))
            begin += count
    batches.sort(key=lambda batch: batch[0])
    parts = [values for _, values in batches]
    if isinstance(parts[0], list):
        return [tensor for values in parts for tensor in values]
    return torch.cat([values for values in parts if isinstance(values, Tensor)])


def _unpacked(column: dict[str, Any], data: Tensor, num_samples: int) -> Values:
    flat = data.view(getattr(torch, column["dtype"]))
    if not column["ragged"]:
        return flat.view(num_samples, *column["shape"])
    ndim, sizes = column["ndim"], column["sizes"].tolist()
    shapes = [sizes[begin : begin + ndim] for begin in range(0, len(sizes), ndim)]
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    # copies, so that no sample keeps all others in memory
    return [piece.reshape(shape).clone() for piece, shape in zip(pieces, shapes, strict=True)]
