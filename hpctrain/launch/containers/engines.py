"""The engines by their names in `cluster.container.engine`."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.launch.containers import apptainer, charliecloud, oci, pyxis
from hpctrain.launch.containers.rank_container import RankContainer

ENTER = {"apptainer": apptainer.enter, "charliecloud": charliecloud.enter, "oci": oci.enter, "pyxis": pyxis.enter}


def enter_container(container: RankContainer, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Prepare the container of an attempt's ranks, and return how srun starts a rank in it.

    Args:
        container: of the ranks.
        command: of a rank, as it is outside of a container.

    Returns:
        Further options for srun, and the command that srun executes.

    Raises:
        ContainerError: the image can't be used.
        OSError: the file system is unavailable.
    """
    # env(1) and not the engines' own options: Apptainer splits values at commas, Charliecloud replaces $NAME, and Pyxis
    # takes no values
    variables = [f"{name}={value}" for name, value in container.variables.items()]
    inside = ["env", *variables, *command] if variables else list(command)
    return ENTER[container.engine](container, inside)
