"""Checks of the files and folders that a configuration names, on this machine and without torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpctrain.errors import ConfigError

MAX_NAME_BYTES = 255
"""Longest name of a file or folder on Linux's file systems."""
MAX_PATH_BYTES = 3500
"""Longest run directory: Linux's bound is 4,095, and a run has paths of its own inside."""
BEGINNINGS_OF_WEIGHTS = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of what torch.save writes: a zip archive, and before torch 1.6 a pickle."""
WEIGHTS = "name a run, a checkpoint or a file of weights"


def found(key: str, path: str | os.PathLike[str]) -> os.stat_result | None:
    """Look at a path; None if it doesn't exist.

    Raises:
        ConfigError: it can't be accessed: a folder on the way is closed, or a name is too long.
    """
    try:
        return Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(key, path, f"can't be accessed: {reason}", "correct it, or choose another path") from error


def is_folder(key: str, path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder.

    Raises:
        ConfigError: it can't be accessed, or it is a folder that this user can't read.
    """
    status = found(key, path)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return False
    _require_access(key, path, os.R_OK | os.X_OK)
    return True


def check_run_directory(path: str, *, in_batch_script: bool) -> None:
    """Check that a run directory can be created, or opened, before anything is written.

    Args:
        path: of the run or the sweep.
        in_batch_script: SLURM writes the logs, and replaces patterns in their paths.

    Raises:
        ConfigError: it can't be.
    """
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - as RunDirectory does: a link that the user wants is kept
    if any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in whole.parts):
        raise ConfigError("run_dir", path, f"has a name of more than {MAX_NAME_BYTES} bytes", "choose a shorter one")
    if len(os.fsencode(whole)) > MAX_PATH_BYTES:
        raise ConfigError("run_dir", path, f"is longer than {MAX_PATH_BYTES} bytes", "choose a shorter path")
    if in_batch_script and (character := next((one for one in "%\\" if one in str(whole)), None)):
        problem = f"contains a {character}, which SLURM replaces in log file names"
        raise ConfigError("run_dir", whole, problem, "choose a path without it")
    nearest = next(folder for folder in (whole, *whole.parents) if found("run_dir", folder) is not None)
    if not nearest.is_dir():
        raise ConfigError("run_dir", path, f"{nearest} is not a folder", "choose another path")
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        # the reason may be a read-only file system, too
        raise ConfigError("run_dir", path, f"you have no permission to write to {nearest}", "choose another folder")


def check_weights(path: str) -> None:
    """Check that `init_from` is something with weights, as far as that is known without torch.

    Raises:
        ConfigError: it isn't, or can't be read.
    """
    if not path:
        # Path("") is the working directory, which exists
        raise ConfigError("init_from", path, "is empty", f"{WEIGHTS}, or null")
    status = found("init_from", path)
    if status is None:
        raise ConfigError("init_from", path, "does not exist", WEIGHTS)
    if is_folder("init_from", path):
        if not any(Path(path, name).exists() for name in ("config.yaml", "manifest.json")):
            raise ConfigError("init_from", path, "is neither a run nor a checkpoint", WEIGHTS)
        return
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("init_from", path, "is not a file", WEIGHTS)
    _require_access("init_from", path, os.R_OK)
    if Path(path).suffix != ".safetensors":
        with Path(path).open("rb") as file:
            if not file.read(4).startswith(BEGINNINGS_OF_WEIGHTS):
                raise ConfigError("init_from", path, "is not a file that torch.save wrote", WEIGHTS)


def _require_access(key: str, path: str | os.PathLike[str], mode: int) -> None:
    if not os.access(path, mode, effective_ids=True):
        raise ConfigError(key, path, "you have no permission to read it", "correct its permissions, or choose another")


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
