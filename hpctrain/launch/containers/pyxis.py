"""Pyxis, NVIDIA's plugin of srun: it starts Enroot's containers."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.launch.containers.rank_container import RankContainer


def enter(container: RankContainer, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return options for srun, and the command of a rank.

    Source: https://github.com/NVIDIA/pyxis/blob/master/README.md.

    The container has a name, so that a node imports the image once for all of its ranks, and for all attempts of a job
    before its next requeue.

    Args:
        container: of the ranks.
        command: of a rank in it.
    """
    mounts = [f"{one.host}:{one.inside}{':ro' if one.is_read_only else ''}" for one in container.mounts]
    options = [
        f"--container-image={container.image}",
        f"--container-name={container.name}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={container.working_directory}",
        # all others reach the ranks as well, unless the image sets them
        f"--container-env={','.join(container.from_node)}",
    ]
    return options, list(command)
