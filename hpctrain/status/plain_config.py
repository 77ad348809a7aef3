"""A run's configuration as plain values, read with yaml alone: OmegaConf takes longer to import than all else here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpctrain.config.nesting import refuse_deep

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_plain_config(path: Path) -> Mapping[str, Any]:
    """Read the configuration as plain values; empty if it can't be read."""
    try:
        refuse_deep(path)
        config = yaml.load(path.read_bytes(), Loader=_LOADER)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
