"""The folders with configuration: hpctrain's own, that of `--config-dir`, and `./conf`."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.config.paths import is_folder
from hpctrain.errors import ConfigError


def conf_dir() -> Path:
    """Return the folder of hpctrain's configuration: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def own_folders(config_dir: str | None, folder: Path | None = None) -> tuple[Path | None, Path | None]:
    """Return the user's folders: that of `--config-dir`, and `./conf`; None for one that isn't there.

    Args:
        config_dir: as typed; None for none.
        folder: that contains `conf`; None for the working directory.

    Raises:
        ConfigError: it isn't a folder, or can't be read.
    """
    named = None if config_dir is None else Path(config_dir).absolute()
    if named is not None and not is_folder("--config-dir", named):
        raise ConfigError("--config-dir", config_dir, "is not a folder", "name the folder that contains your groups")
    here = ((folder or Path()) / "conf").absolute()
    known = [folder.resolve() for folder in (conf_dir(), named) if folder is not None]
    usable = os.access(here, os.R_OK | os.X_OK) and here.is_dir() and here.resolve() not in known
    return named, here if usable else None
