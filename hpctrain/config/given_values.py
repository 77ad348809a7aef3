"""Check values that users give to the classes that come with hpctrain, in files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config import require


def check_given(schema: type, key: str, given: Mapping[str, Any]) -> None:
    """Check values that a file of one's own gives to some of a schema's fields: their types, and as `Checked` does.

    Args:
        schema: a dataclass.
        key: full name of the node that has them.
        given: by name; others than the schema's are ignored.

    Raises:
        ConfigError: a value is wrong; names its key in the node.
    """
    typed = OmegaConf.structured(schema)
    for name, checks in require.checks_of(schema).items():
        if name not in given:
            continue
        try:
            typed[name] = given[name]
            # the class gets the value as it was written, and not as OmegaConf converts it
            is_converted = typed[name] != given[name]
        # a number of hundreds of digits overflows
        except (OmegaConfBaseException, OverflowError) as error:
            raise require.wrong_type(schema, name, f"{key}.{name}", given[name]) from error
        # a text that OmegaConf converts is no number, so the checks of numbers would fail on it
        if not (is_converted and isinstance(given[name], str)):
            require.check_one(f"{key}.{name}", given[name], checks)
        if is_converted:
            raise require.wrong_type(schema, name, f"{key}.{name}", given[name])
