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

    def add_part(self, name: str, one: Path | None, other: Path | None) -> None:
        """Compare a file, or a folder of DCP, that is in both saves or in one of them.

        Args:
            name: its path relative to the save; empty if it is the save.
            one: in the first save; None if that has none.
            other: in the second one.
        """
        shown = name or str((one or other or Path()).name)
        try:
            mine, theirs = (SavedTensors() if path is None else read_part(path) for path in (one, other))
            if mine is None or theirs is None or not (mine.is_useful or theirs.is_useful):
                self.left_out.append(shown)
            else:
                self._add_tensors(name, mine, theirs)
        # whatever a file contains: the report names it
        except Exception as error:
            if one and other and one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False):
                self.identical.append(shown)
            else:
                self.unreadable[shown] = f"{type(error).__name__}: {str(error).partition(LINE)[0]}"

    def _add_tensors(self, part: str, one: SavedTensors, other: SavedTensors) -> None:
        prefix = f"{part}:" if part else ""
        differing: list[TensorDifference] = []
        names = list(dict.fromkeys([*one.tensors, *other.tensors]))
        for name in names:
            if name not in one.tensors or name not in other.tensors:
                where = "second" if name in one.tensors else "first"
                found = TensorDifference(name=f"{prefix}{name}", problem=f"isn't in the {where} save")
            else:
                compared = compare_tensors(f"{prefix}{name}", one.tensors[name](), other.tensors[name]())
                if compared is None:
                    continue
                found = compared
            differing.append(found)
        # not before the last one was read
        self.differing += differing
        self.equal += len(names) - len(differing)
        self.tensors = (self.tensors[0] + len(one.tensors), self.tensors[1] + len(other.tensors))
        for name in dict.fromkeys([*one.numbers, *other.numbers]):
            # as text, which is exact, because NaN isn't equal to itself
            if repr(one.numbers.get(name)) != repr(other.numbers.get(name)):
                self.numbers.append(f"{prefix}{name}")


def compare_saves(one: Path, other: Path) -> SaveComparison:
    """Compare two files, or two folders file by file; not collective.

    Args:
        one: of the first run.
        other: of the second.
    """
    result = SaveComparison()
    mine, theirs = parts_of(one), parts_of(other)
    for name in dict.fromkeys([*mine, *theirs]):
        result.add_part(name, mine.get(name), theirs.get(name))
    return result


def compare_tensors(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference | None:
    """Compare two dense tensors on the CPU; return None if they are the same, to the last bit."""
    kinds = [f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.") for tensor in (one, other)]
    if kinds[0] != kinds[1]:
        return TensorDifference(name=name, problem=f"{kinds[0]} and {kinds[1]}")
    if one.is_complex():
        one, other = (torch.view_as_real(tensor.resolve_conj()) for tensor in (one, other))
    if torch.equal(element_bytes(one), element_bytes(other)):
        return None
    flat = [tensor.resolve_neg().contiguous().reshape(-1) for tensor in (one, other)]
    # two large integers may be the same as floating-point numbers
    absolute, largest = 0.0 if one.is_floating_point() else 1.0, 0.0
    for mine, theirs in zip(torch.split(flat[0], CHUNK), torch.split(flat[1], CHUNK), strict=True):
        difference, magnitude = _largest(mine.double(), theirs.double())
        absolute = max(absolute, difference)
        largest = max(largest, magnitude)
    is_finite = math.isfinite(absolute)
    return TensorDifference(
        name=name,
        problem="" if is_finite else NOT_FINITE,
        dtype=str(one.dtype).removeprefix("torch."),
        shape=tuple(one.shape),
        absolute=absolute if is_finite else None,
        relative=absolute / (largest or 1.0) if is_finite else None,
    )


def _largest(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest finite magnitude."""
    # the same infinity, or NaN, in both is no difference
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    magnitude = torch.maximum(one.abs(), other.abs()).nan_to_num(nan=0.0, posinf=0.0)
    return float(difference.max()), float(magnitude.max())


def main(arguments: list[str]) -> None:
    """Compare two saves, and print the result as JSON."""
    warnings.simplefilter("ignore")
    one, other = map(Path, arguments)
    sys.stdout.write(json.dumps(asdict(compare_saves(one, other)), allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1:])
