"""Field types of a run's JSON records, which are checked on every read because users may have edited the files."""

from __future__ import annotations

import functools
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_or_empty

R = TypeVar("R")

_LARGEST = 2**63
"""Bound on whole numbers: JSON allows hundreds of digits, which no float holds."""
_LAST_TIME = 253_402_300_800.0  # the year 10,000, at which calendars end


def _unchanged(value: object) -> object:
    return value


@dataclass(frozen=True, slots=True)
class FieldType:
    """A type of values in JSON.

    Attributes:
        name: as in ``expected NAME``.
        accepts: whether a value has the type.
        convert: makes what Python has for such a value.
    """

    name: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = _unchanged


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(TEXT.accepts, value))


def _is_path(value: object) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _values_of(values: FieldType, name: str) -> FieldType:
    return FieldType(name, lambda value: isinstance(value, dict) and all(map(values.accepts, value.values())))


def up_to(largest: int) -> FieldType:
    """The type of whole numbers from 0 to a largest one, for what is counted through or allocated."""
    return FieldType(f"a whole number from 0 to {largest}", lambda value: COUNT.accepts(value) and value <= largest)


TEXT = FieldType("a string", lambda value: isinstance(value, str))
PATH = FieldType("a path", _is_path)
NAME = FieldType("a name", lambda value: TEXT.accepts(value) and len(value.split()) == 1)
TEXTS = FieldType("a list of strings", _are_texts, tuple)
TEXT_BY_NAME = _values_of(TEXT, "an object of strings")
TEXTS_BY_NAME = _values_of(TEXTS, "an object of lists of strings")
NUMBER = FieldType("a number", _is_number)
NUMBERS_BY_NAME = _values_of(NUMBER, "numbers by name")
POSITIVE = FieldType("a number above 0", lambda value: _is_number(value) and value > 0)
WHOLE = FieldType("a whole number", _is_whole)
COUNT = FieldType("a whole number, 0 or more", lambda value: _is_whole(value) and value >= 0)
COUNTS_BY_NAME = _values_of(COUNT, "counts by name")
RANKS = up_to(2**20)
"""A number of ranks: some messages list them."""
TIME = FieldType("epoch seconds", lambda value: _is_number(value) and 0 <= value < _LAST_TIME)
FLAG = FieldType("true or false", lambda value: isinstance(value, bool))


@functools.cache
def field_types(schema: type) -> dict[str, FieldType]:
    """The types of a record's fields by name, from a dataclass with fields such as ``Annotated[int | None, COUNT]``."""
    hints = get_type_hints(schema, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def decode(schema: type[R], record: object) -> R | None:
    """Make a record from JSON; None if a field of it is wrong, or one without a default is missing.

    Args:
        schema: a dataclass whose fields have types; see `field_types`.
        record: as read; fields that the schema doesn't have are left out, as those of a later version.
    """
    kind: type = schema  # mypy doesn't know that a type[R] is hashable
    types = field_types(kind)
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if not isinstance(record, dict) or describe_wrong_field(record, types, tuple(needed)):
        return None
    return schema(**converted(record, types))


def converted(record: Mapping[str, Any], types: Mapping[str, FieldType]) -> dict[str, Any]:
    """The fields of a record that have these types, as Python has them, without those that are null."""
    return {name: kind.convert(record[name]) for name, kind in types.items() if record.get(name) is not None}


def describe_wrong_field(
    record: Mapping[str, Any], types: Mapping[str, FieldType], required: tuple[str, ...] = ()
) -> str:
    """Describe the first field of a record that doesn't have its type; empty if there is none.

    Args:
        record: as read; null stands for a field that isn't there, and fields without a type are not checked.
        types: by the field's name.
        required: the fields that must be there.
    """
    # few of the types' fields are in one record
    for name in (*record, *(name for name in required if name not in record)):
        value, expected = record.get(name), types.get(name)
        if expected is None or (value is None and name not in required):
            continue
        if not expected.accepts(value):
            return f"expected {name} to be {expected.name}, found {_shown(value)}"
    return ""


def require_fields(
    path: Path, record: Mapping[str, Any], types: Mapping[str, FieldType], required: tuple[str, ...] = ()
) -> None:
    """Raise if a field of a record doesn't have its type; see `describe_wrong_field`.

    Raises:
        RunDirectoryError: names file, field and value.
    """
    if mistake := describe_wrong_field(record, types, required):
        raise RunDirectoryError(f"{path}: {mistake}; correct the file, or move it away")


def read_fields(path: Path, types: Mapping[str, FieldType], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a record; empty if the file is missing or isn't a JSON object.

    Raises:
        RunDirectoryError: a field of it doesn't have its type.
    """
    record = read_json_or_empty(path)
    if record:
        require_fields(path, record, types, required)
    return record


def list_of(types: Mapping[str, FieldType], required: tuple[str, ...]) -> FieldType:
    """The type of lists of records."""
    record = _record_of(types, required)
    name = f"a list of {record.name}"
    return FieldType(name, lambda value: isinstance(value, list) and all(map(record.accepts, value)))


def by_name(types: Mapping[str, FieldType], required: tuple[str, ...]) -> FieldType:
    """The type of records by name."""
    record = _record_of(types, required)
    return _values_of(record, f"an object of {record.name}")


def _record_of(types: Mapping[str, FieldType], required: tuple[str, ...]) -> FieldType:
    name = f"objects with {', '.join(required)}"
    return FieldType(name, lambda value: isinstance(value, dict) and not describe_wrong_field(value, types, required))


def finite_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the fields of a record that are numbers."""
    return {name: value for name, value in record.items() if _is_number(value)}


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, list | dict) else reprlib.repr(value)
