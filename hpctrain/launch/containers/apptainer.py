"""Apptainer, formerly Singularity."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.launch.containers.rank_container import RankContainer


def enter(container: RankContainer, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return options for srun, of which there are none, and the command that starts a rank in its container.

    Source: https://apptainer.org/docs/user/latest/cli/apptainer_exec.html.

    Args:
        container: of the ranks.
        command: of a rank in it.
    """
    line = ["apptainer", "exec"]
    if container.has_gpus:
        line.append("--nv")
    for one in container.mounts:
        line += ["--bind", f"{one.host}:{one.inside}{':ro' if one.is_read_only else ''}"]
    return [], [*line, "--pwd", container.working_directory, container.image, *command]
