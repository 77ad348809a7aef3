"""SLURM's compact lists: node names and tasks per node."""

from __future__ import annotations

import itertools
import math
import re

from hpctrain.errors import ClusterEnvironmentError

_TERM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_MOST_NODES = 65536  # SLURM's own bound on a range; it prevents a mistyped list from filling the memory


def expand(nodelist: str, *, variable: str = "nodelist") -> list[str]:
    """Expand a list such as `rack[01-02]n[1-2],login` into node names, in its order, duplicates included.

    Equal to `scontrol show hostnames`, but needs no SLURM on this machine. Numbers are zero-padded to the width of the
    range's start.

    Args:
        nodelist: the list as SLURM writes it.
        variable: the variable that holds it, for the error.

    Raises:
        ClusterEnvironmentError: the list can't be read.
    """
    names: list[str] = []
    for term in _terms(nodelist, variable):
        choices = [
            _numbers(inside, nodelist, variable) if inside or not literal else [literal]
            for inside, literal in _PIECE.findall(term)
        ]
        if len(names) + math.prod(map(len, choices)) > _MOST_NODES:
            raise _unreadable(nodelist, f"more than {_MOST_NODES} nodes", variable)
        names += ("".join(parts) for parts in itertools.product(*choices))
    return names


def tasks_per_node(text: str, *, variable: str = "tasks_per_node") -> list[int]:
    """Parse the number of tasks on each node from SLURM's `2(x3),1`.

    Raises:
        ClusterEnvironmentError: the text can't be read.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None or int(found[2] or 1) > _MOST_NODES:
            raise ClusterEnvironmentError(
                f"expected {variable} to read like 2(x3),1; start the ranks with srun, or unset {variable}",
                {variable: text},
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _terms(nodelist: str, variable: str) -> list[str]:
    """Split a list at the commas outside brackets."""
    # a comma inside brackets separates numbers: it is followed by a closing bracket before any opening one
    terms = re.split(r",(?![^\[\]]*\])", nodelist)
    for term in terms:
        if not _TERM.fullmatch(term):
            raise _unreadable(nodelist, f"{term!r} is not a node name", variable)
    return terms


def _numbers(inside: str, nodelist: str, variable: str) -> list[str]:
    """Expand the numbers of one bracket, such as `000-002,7`."""
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _unreadable(nodelist, f"{part!r} is not a range of numbers", variable)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _unreadable(nodelist, f"the range {part} runs backwards", variable)
        if int(last) - int(first) >= _MOST_NODES:
            raise _unreadable(nodelist, f"more than {_MOST_NODES} nodes", variable)
        numbers += (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return numbers


def _unreadable(nodelist: str, found: str, variable: str) -> ClusterEnvironmentError:
    return ClusterEnvironmentError(
        f"expected {variable} to be a node list such as rack[01-02]n[1-2], but {found}; "
        f"start the ranks with srun, or unset {variable}",
        {variable: nodelist},
    )
