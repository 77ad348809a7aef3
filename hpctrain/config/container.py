"""``cluster.container``: the image in which the ranks run, and what they see in it. Owner: hpctrain.launch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated

from hpctrain.config import require
from hpctrain.config.rank_variables import check_variables
from hpctrain.errors import ConfigError

ENGINES = ("apptainer", "charliecloud", "oci", "pyxis")
"""What can start containers on the nodes."""
IMAGE_FILES = (".sif", ".sqsh", ".sqfs", ".squashfs", ".img", ".tar")
"""How the names of files end that contain an image."""
SEPARATORS = ",:"
"""Characters that the engines' options take for the end of a path."""
WITHOUT_IMAGE = "has no effect without an image"


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the node that the ranks see in their container.

    Attributes:
        host: its path on the node.
        inside: its path in the container.
        is_read_only: whether the ranks can't write there.
    """

    host: str
    inside: str
    is_read_only: bool = False

    @classmethod
    def read(cls, text: str) -> Mount:
        """Read ``HOST[:CONTAINER[:ro]]``, or ``HOST:ro``, whose form was checked."""
        host, *rest = text.split(":")
        is_read_only = rest[-1:] == ["ro"]
        paths = rest[:-1] if is_read_only else rest
        return cls(host, paths[0] if paths else host, is_read_only)


def _check_mount(key: str, text: str) -> None:
    require.single_line(key, text)
    host, *rest = text.split(":")
    paths = [host, *(rest[:-1] if rest[-1:] == ["ro"] else rest)]
    if len(paths) > 2 or not all(paths):
        raise ConfigError(key, text, "is not a mount", "write HOST, HOST:CONTAINER or HOST:CONTAINER:ro")
    for path in paths:
        if "," in path:
            raise ConfigError(key, text, "contains a comma, at which the engines end a path", "use another path")
        if not path.startswith("/"):
            raise ConfigError(key, text, "is not absolute", "write absolute paths; a shell replaces $HOME by yours")
        if ".." in PurePosixPath(path).parts or path.strip("/") == "":
            raise ConfigError(key, text, "can't be mounted", "name a folder below /, without ..")


def _check_image(key: str, image: str) -> None:
    if image.startswith("~"):
        problem = "begins with ~, which hpctrain doesn't expand"
        raise ConfigError(key, image, problem, "write the absolute path; a shell replaces $HOME by yours")
    if image.startswith("-"):
        raise ConfigError(key, image, "begins with a dash, as an option does", "name an image")


@dataclass(kw_only=True, slots=True)
class Container(require.Checked):
    """The container of the ranks; the batch script stays outside.

    Owner: hpctrain.launch.
    """

    prefix = "cluster.container."

    image: Annotated[str | None, require.not_empty, require.single_line, _check_image] = None
    """Image in which the ranks run: the absolute path of a file or folder, or a name that the engine knows; null: no
    container. It must have hpctrain and torch."""
    engine: Annotated[str | None, require.one_of(*ENGINES)] = None
    """What starts the containers: `pyxis`, `apptainer`, `charliecloud`, or `oci` for SLURM's own `srun --container`;
    required with an image."""
    mounts: Annotated[list[str], require.each(_check_mount)] = field(default_factory=list)
    """Files and folders that the ranks see, in addition to the run directory and the working directory: HOST,
    HOST:CONTAINER or HOST:CONTAINER:ro, absolute."""
    env: Annotated[dict[str, str], check_variables] = field(default_factory=dict)
    """Environment variables in the container, name to value, which are set before Python starts, such as PATH."""

    def __post_init__(self) -> None:
        """Also refuse keys without an image, an image without an engine, and what the engine can't do."""
        # not super(): slots=True makes a second class, and super() looks for the first (CPython issue 90562)
        require.Checked.__post_init__(self)
        if self.image is None:
            self._refuse_without_image()
            return
        if self.engine is None:
            choices = f"set cluster.container.engine to one of {', '.join(ENGINES)}"
            raise ConfigError("cluster.container.image", self.image, "needs an engine that starts it", choices)
        self._refuse_relative_path(self.image)
        for text in self.mounts if self.engine == "charliecloud" else ():
            if Mount.read(text).is_read_only:
                problem = "is read-only, which Charliecloud can't do"
                raise ConfigError("cluster.container.mounts", text, problem, "leave :ro out")

    def _refuse_without_image(self) -> None:
        for name in ("engine", "mounts", "env"):
            if value := getattr(self, name):
                remedy = "set cluster.container.image, or leave it out"
                raise ConfigError(f"cluster.container.{name}", value, WITHOUT_IMAGE, remedy)

    def _refuse_relative_path(self, image: str) -> None:
        if image.startswith("/"):
            return
        names_file = image.startswith(".") or image.endswith(IMAGE_FILES)
        if names_file or self.engine == "oci" or (self.engine == "apptainer" and "://" not in image):
            what = "the folder of a bundle" if self.engine == "oci" else "the image"
            remedy = f"write the absolute path of {what}"
            if self.engine in ("apptainer", "pyxis"):
                remedy += ", or a URI such as docker://pytorch/pytorch"
            raise ConfigError("cluster.container.image", image, "is a relative path", remedy)


def check_container(container: Container, srun_args: Sequence[str], ranks_per_node: int) -> None:
    """Refuse a container together with what can't work in it.

    Args:
        container: of the ranks; each value is already checked by itself.
        srun_args: the user's options for srun.
        ranks_per_node: that srun starts.

    Raises:
        ConfigError: the first combination that can't work.
    """
    if container.image is None:
        return
    for option in srun_args:
        if re.match(r"--container($|[=-])", option):
            remedy = "leave it out, or leave cluster.container out"
            raise ConfigError("cluster.srun_args", option, "starts a container, as cluster.container does", remedy)
    if container.engine == "oci" and ranks_per_node > 1:
        # "Task count specification invalid", and a task isn't told its number (SLURM 22.05)
        problem = f"starts one process in a container per node, but the run has {ranks_per_node} per node"
        remedy = "use another engine, or set cluster.processes_per_node=1"
        raise ConfigError("cluster.container.engine", "oci", problem, remedy)


def check_mounted(container: Container, what: str, path: str) -> None:
    """Refuse a path that the engines' options for mounts can't express.

    Args:
        container: of the ranks.
        what: the path is, for the message.
        path: that has to be mounted.

    Raises:
        ConfigError: it contains a separator.
    """
    if container.image is not None and (found := next((one for one in SEPARATORS if one in path), None)):
        problem = f"contains {found!r}, at which the engines of containers end a path"
        raise ConfigError(what, path, problem, "use another folder")
