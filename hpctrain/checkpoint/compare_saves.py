"""Compare the tensors of two saves: `python -m hpctrain.checkpoint.compare_saves ONE OTHER` prints JSON."""

from __future__ import annotations

import filecmp
import json
import math
import sys
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from hpctrain.checkpoint.host_memory import element_bytes
from hpctrain.checkpoint.saved_tensors import SavedTensors, parts_of, read_part

CHUNK = 2**22
"""Elements that are compared at a time: the copies in double precision need memory."""
LINE = "\n"
NOT_FINITE = "NaN or infinite in one save alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that isn't the same, to the last bit, in both saves.

    Attributes:
        name: with the file, if the save is a folder: `FILE:NAME`.
        problem: why the values can't be compared, such as another shape; empty if they can.
        dtype: of the tensor in the first save.
        shape: of that tensor.
        absolute: the largest absolute difference between two elements; None if they can't be compared.
        relative: the same, relative to the largest magnitude in either tensor.
    """

    name: str
    problem: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    absolute: float | None = None
    relative: float | None = None


@dataclass(slots=True)
class SaveComparison:
    """The result of a comparison.

    Attributes:
        tensors: number of tensors in each save.
        equal: number of tensors that are the same, to the last bit.
        differing: the others.
        identical: files whose tensors can't be read, but that are the same byte for byte.
        unreadable: those that aren't: path and reason.
        left_out: files without tensors and numbers, which aren't compared.
        numbers: names of the numbers outside of tensors that differ.
    """

    tensors: tuple[int, int] = (0, 0)
    equal: int = 0
    differing: list[TensorDifference] = field(default_factory=list)
    identical: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)

    def add_part(self, name: str, first: Path | None, second: Path | None) -> None:
        """Compare a file, or a folder of DCP, that is in both saves or in one of them.

        Args:
            name: its path relative to the save; empty if it is the save.
            first: in the first save; None if that has none.
            second: in the second one.
        """
        label = name or str((first or second or Path()).name)
        try:
            parts = [SavedTensors() if path is None else read_part(path) for path in (first, second)]
            readable = [part for part in parts if part is not None]
            if len(readable) == 2 and any(part.is_useful for part in readable):
                self._add_tensors(name, *readable)
            else:
                self.left_out.append(label)
        # whatever a file contains: the report names it
        except Exception as error:
            if first and second and first.is_file() and second.is_file() and filecmp.cmp(first, second, shallow=False):
                self.identical.append(label)
            else:
                self.unreadable[label] = f"{type(error).__name__}: {str(error).partition(LINE)[0]}"

    def _add_tensors(self, part: str, first: SavedTensors, second: SavedTensors) -> None:
        prefix = f"{part}:" if part else ""
        differing: list[TensorDifference] = []
        names = list(dict.fromkeys([*first.tensors, *second.tensors]))
        for name in names:
            if name not in first.tensors or name not in second.tensors:
                where = "second" if name in first.tensors else "first"
                differing.append(TensorDifference(name=f"{prefix}{name}", problem=f"isn't in the {where} save"))
            elif difference := compare_tensors(f"{prefix}{name}", first.tensors[name](), second.tensors[name]()):
                differing.append(difference)
        # not before the last one was read
        self.differing += differing
        self.equal += len(names) - len(differing)
        self.tensors = (self.tensors[0] + len(first.tensors), self.tensors[1] + len(second.tensors))
        for name in dict.fromkeys([*first.numbers, *second.numbers]):
            # as text, which is exact, because NaN isn't equal to itself
            if repr(first.numbers.get(name)) != repr(second.numbers.get(name)):
                self.numbers.append(f"{prefix}{name}")


def compare_saves(first: Path, second: Path) -> SaveComparison:
    """Compare two files, or two folders file by file; not collective.

    Args:
        first: of the first run.
        second: of the second.
    """
    comparison = SaveComparison()
    first_parts, second_parts = parts_of(first), parts_of(second)
    for name in dict.fromkeys([*first_parts, *second_parts]):
        comparison.add_part(name, first_parts.get(name), second_parts.get(name))
    return comparison


def compare_tensors(name: str, first: torch.Tensor, second: torch.Tensor) -> TensorDifference | None:
    """Compare two dense tensors on the CPU; return None if they are the same, to the last bit."""
    forms = [f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.") for tensor in (first, second)]
    if forms[0] != forms[1]:
        return TensorDifference(name=name, problem=f"{forms[0]} and {forms[1]}")
    if first.is_complex():
        first, second = (torch.view_as_real(tensor.resolve_conj()) for tensor in (first, second))
    if torch.equal(element_bytes(first), element_bytes(second)):
        return None
    flat = [tensor.resolve_neg().contiguous().reshape(-1) for tensor in (first, second)]
    # two large integers may be the same as floating-point numbers
    absolute, largest = 0.0 if first.is_floating_point() else 1.0, 0.0
    for first_chunk, second_chunk in zip(torch.split(flat[0], CHUNK), torch.split(flat[1], CHUNK), strict=True):
        difference, magnitude = _largest_difference(first_chunk.double(), second_chunk.double())
        absolute = max(absolute, difference)
        largest = max(largest, magnitude)
    is_finite = math.isfinite(absolute)
    return TensorDifference(
        name=name,
        problem="" if is_finite else NOT_FINITE,
        dtype=str(first.dtype).removeprefix("torch."),
        shape=tuple(first.shape),
        absolute=absolute if is_finite else None,
        relative=absolute / (largest or 1.0) if is_finite else None,
    )


def _largest_difference(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest finite magnitude."""
    # the same infinity, or NaN, in both is no difference
    is_equal = (first == second) | (first.isnan() & second.isnan())
    difference = torch.where(is_equal, 0.0, (first - second).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    magnitude = torch.maximum(first.abs(), second.abs()).nan_to_num(nan=0.0, posinf=0.0)
    return float(difference.max()), float(magnitude.max())


def main(arguments: list[str]) -> None:
    """Compare two saves, and print the result as JSON."""
    warnings.simplefilter("ignore")
    first, second = map(Path, arguments)
    sys.stdout.write(json.dumps(asdict(compare_saves(first, second)), allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1:])
