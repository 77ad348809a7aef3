"""Charliecloud: ch-run starts containers without privileges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.files import describe_os_error
from hpctrain.launch.containers.rank_container import ContainerError, RankContainer

ENVIRONMENT = "ch/environment"
"""The file of an image with the variables that its Dockerfile sets."""


def enter(container: RankContainer, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Make the folders of an image for its mounts; return options for srun, of which there are none, and the command.

    Args:
        container: of the ranks.
        command: of a rank in it.

    Raises:
        ContainerError: the image is a folder that lacks a mount's, and that this user can't write.
    """
    image = Path(container.image)
    is_folder = image.is_absolute() and image.is_dir()
    if is_folder:
        _make_mount_points(container, image)
    return [], ch_run(container, command, sets_variables=is_folder and (image / ENVIRONMENT).is_file())


def ch_run(container: RankContainer, command: Sequence[str], *, sets_variables: bool) -> list[str]:
    """Return the command that starts a rank in its container.

    Source: ch-run(1) of Charliecloud 0.31.

    Args:
        container: of the ranks.
        command: of a rank in it.
        sets_variables: whether the image has variables of its own; otherwise PATH is the node's.
    """
    # ch-run refuses to start without USER, which SLURM doesn't set
    line = ["env", f"USER={container.user}", "ch-run"]
    if sets_variables:
        line.append("--set-env")
    for one in container.mounts:
        line += ["--bind", f"{one.host}:{one.inside}"]
    return [*line, "--cd", container.working_directory, container.image, "--", *command]


def _make_mount_points(container: RankContainer, image: Path) -> None:
    """Make folders that ch-run can't: it sees the image read-only, and with --write the ranks could change it."""
    shown: list[str] = []
    for one in container.mounts:
        point = image / one.inside.lstrip("/")
        # what is inside of another mount is on the node, and already there
        if not any(Path(one.inside).is_relative_to(other) for other in shown) and not point.exists():
            _make(point, Path(one.host))
        shown.append(one.inside)


def _make(point: Path, source: Path) -> None:
    try:
        if source.is_file():
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
        else:
            point.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ContainerError(
            f"cluster.container.image has no {point} for a mount, and it can't be made: {describe_os_error(error)}; "
            f"make it yourself, or mount the folder where the image has one"
        ) from error
