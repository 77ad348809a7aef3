"""Files and folders: those that a configuration names, and those in which its groups and options are found.

Tab completion reads groups, options and keys from files and schemas: composing takes a third of a second.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from hpctrain.config.root import GROUPS, LIST_GROUPS, Config
from hpctrain.errors import ConfigError

MAX_NAME_BYTES = 255
"""Longest name of a file or folder on Linux's file systems."""
MAX_PATH_BYTES = 3500
"""Longest run directory: Linux's bound is 4,095, and a run has paths of its own inside."""
BEGINNINGS_OF_WEIGHTS = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of what torch.save writes: a zip archive, and before torch 1.6 a pickle."""
WEIGHTS = "name a run, a checkpoint or a file of weights"
MAX_BASES = 8
"""Options that extend one another; more are probably a circle."""


def stat_or_none(key: str, path: str | os.PathLike[str]) -> os.stat_result | None:
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
    status = stat_or_none(key, path)
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
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - as RunDirectory does: a link that the user wants is kept
    if any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in absolute.parts):
        raise ConfigError("run_dir", path, f"has a name of more than {MAX_NAME_BYTES} bytes", "choose a shorter one")
    if len(os.fsencode(absolute)) > MAX_PATH_BYTES:
        raise ConfigError("run_dir", path, f"is longer than {MAX_PATH_BYTES} bytes", "choose a shorter path")
    if in_batch_script and (character := next((special for special in "%\\" if special in str(absolute)), None)):
        problem = f"contains a {character}, which SLURM replaces in log file names"
        raise ConfigError("run_dir", absolute, problem, "choose a path without it")
    nearest = next(folder for folder in (absolute, *absolute.parents) if stat_or_none("run_dir", folder) is not None)
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
    status = stat_or_none("init_from", path)
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
    flag_folder = None if config_dir is None else Path(config_dir).absolute()
    if flag_folder is not None and not is_folder("--config-dir", flag_folder):
        raise ConfigError("--config-dir", config_dir, "is not a folder", "name the folder that contains your groups")
    here = ((folder or Path()) / "conf").absolute()
    resolved_folders = [folder.resolve() for folder in (conf_dir(), flag_folder) if folder is not None]
    usable = os.access(here, os.R_OK | os.X_OK) and here.is_dir() and here.resolve() not in resolved_folders
    return flag_folder, here if usable else None


def groups_of(folders: Sequence[Path]) -> list[str]:
    """Return the groups with options in these folders."""
    return sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")} - {"hydra"})


def options_of(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the options of a group, with `null` for one that needs none."""
    names = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
    return sorted(names | ({"null"} if group == "experiment" else set()))


def top_level_keys() -> list[str]:
    """Return the keys outside of any group."""
    return [field.name for field in fields(Config) if field.name not in GROUPS]


def keys_of(group: str, choice: str | None, folders: Sequence[Path]) -> list[str]:
    """Return the full names of a group's keys.

    Args:
        group: its name.
        choice: the option on the command line; None for the default.
        folders: of configuration, in the order in which they are searched.
    """
    if group in LIST_GROUPS:
        return [f"{group}.{name}.{key}" for name in _listed(choice) for key in _names_of(group, name, folders)]
    schemas = GROUPS.get(group, {})
    option = choice or _default(group, folders)
    names: dict[str, None] = {}
    for _ in range(MAX_BASES):
        if option is None or option.startswith("base_"):
            break
        node = _read(group, option, folders)
        group_node = node.get(group, {}) if "experiment" not in group and group in node else node
        names |= dict.fromkeys(key for key in group_node if key not in ("defaults", *GROUPS))
        bases = (name for name in node.get("defaults") or () if isinstance(name, str) and name != "_self_")
        option = next(bases, "").partition("@")[0] or None
    schema = schemas.get((option or "").removeprefix("base_"))
    # without a choice, that of the model depends on the task
    for candidate in [schema] if schema or choice else schemas.values():
        names |= dict.fromkeys(_names(candidate) if candidate else ())
    return [key for name in names if (key := f"{group}.{name}") != "cluster.kind"]  # set by the choice alone


def _listed(choice: str | None) -> list[str]:
    """Return the options of a list as it is typed, such as `[first,second]`; unfinished lists, too."""
    return [name.strip() for name in (choice or "").strip("[]").split(",") if name.strip()]


def _names_of(group: str, name: str, folders: Sequence[Path]) -> list[str]:
    """Return the keys of one option of a group of lists, which are below its name."""
    schema, entry = GROUPS[group].get(name), _read(group, name, folders).get(name)
    keys = [key for key in entry if key != "_target_"] if isinstance(entry, dict) else []
    return [*(key for key in (_names(schema) if schema else ()) if key != "_target_"), *keys]


def _names(schema: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for field in fields(schema):
        if is_dataclass(hints[field.name]):
            yield from _names(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _default(group: str, folders: Sequence[Path]) -> str | None:
    for folder in folders:
        if (folder / "train.yaml").is_file():
            choices = yaml.safe_load((folder / "train.yaml").read_text())["defaults"]
            return next((choice[group] for choice in choices if isinstance(choice, dict) and group in choice), None)
    return None


def _read(group: str, option: str, folders: Sequence[Path]) -> dict[str, Any]:
    for folder in folders:
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            node = yaml.safe_load(path.read_text())
            return node if isinstance(node, dict) else {}
    return {}
