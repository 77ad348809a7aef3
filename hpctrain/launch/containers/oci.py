"""SLURM's own containers, `srun --container`: the site's oci.conf names the runtime, such as runc."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.files import describe_os_error, read_json, write_json
from hpctrain.launch.containers.rank_container import ContainerError, RankContainer

REMEDY = "unpack the image into a bundle, such as with umoci, and name its folder"
CONFIG = "config.json"
"""The description of a container in its bundle."""
ROOT = "rootfs"
"""The root folder in a bundle: SLURM 22.05 looks there, whatever the description says, and runc refuses a link."""
KERNEL = ("/dev", "/proc", "/sys")
"""Folders of an image that the runtime fills."""
KEPT_NAMESPACES = ("mount", "user")
"""Of the others, a rank needs the node's: the network and host name for the rendezvous, shared memory for its peers,
and process ids for signals."""
NOT_WITHOUT_NAMESPACES = ("hostname", "domainname")
REPLACED = ("/dev/shm", "/dev/mqueue")
"""Mounts of a bundle: the usual /dev/shm has 64 MB, too little for loading processes, and NCCL needs the node's."""
FROM_NODE = ("/etc/hosts", "/etc/resolv.conf")
"""Files by which ranks find each other by name."""

# SLURM 22.05 describes the container before it knows the task: a rank has these variables from the batch script, whose
# rank is 0. There is one rank per node. Nothing but a shell is sure to be in an image.
FIND_RANK = """\
read -r host </proc/sys/kernel/hostname; rank=0; found=
for node in $0; do
    if [ "$node" = "$host" ] || [ "$node" = "${host%%.*}" ] || [ "${node%%.*}" = "$host" ]; then
        export SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 SLURMD_NODENAME=$node; found=1
    fi
    rank=$((rank + 1))
done
if [ -z "$found" ]; then
    echo "hpctrain: error: the host name in the container, $host, is none of the nodes $0; use another engine" >&2
    exit 1
fi
exec "$@"
"""


def enter(container: RankContainer, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Write a bundle for the ranks; return the option of srun, and the command of a rank.

    Args:
        container: of the ranks.
        command: of a rank in it.

    Raises:
        ContainerError: the image isn't a bundle.
        OSError: the bundle can't be written.
    """
    image = Path(container.image)
    try:
        config = read_json(image / CONFIG)
    except OSError as error:
        raise ContainerError(
            f"cluster.container.image is not a bundle: {describe_os_error(error)}; {REMEDY}"
        ) from error
    except HpctrainError as error:
        raise ContainerError(f"cluster.container.image is not a bundle: {error}; {REMEDY}") from error
    root = image / config.get("root", {}).get("path", ROOT)
    if not root.is_dir():
        problem = f"it has no folder {root}"
        raise ContainerError(f"cluster.container.image is not a bundle: {problem}; {REMEDY}")
    shown = make_root(container.bundle / ROOT, root, [one.inside for one in container.mounts])
    write_json(container.bundle / CONFIG, bundle_config(config, container, shown))
    return [f"--container={container.bundle}"], rank_words(config, container, command)


def make_root(root: Path, image: Path, points: Sequence[str]) -> dict[str, str]:
    """Make the root folder of the ranks, so that the image can be mounted in it and needs no folders for other mounts.

    Args:
        root: the folder to make.
        image: the image's root.
        points: where else something will be mounted.

    Returns:
        The files and folders of the image that have to be mounted, by their paths in the container.
    """
    found: dict[str, str] = {}

    def lay_out(folder: Path, inside: PurePosixPath) -> None:
        made = root / str(inside).lstrip("/")
        made.mkdir(parents=True, exist_ok=True)
        for entry in sorted(folder.iterdir()):
            place = inside / entry.name
            lacks = [one for one in points if PurePosixPath(one).is_relative_to(place) and not _has(image, one)]
            if entry.is_symlink():
                with contextlib.suppress(FileExistsError):
                    (made / entry.name).symlink_to(entry.readlink())
            elif lacks and entry.is_dir():
                lay_out(entry, place)
            elif str(place) not in KERNEL:
                found[str(place)] = str(entry)

    lay_out(image, PurePosixPath("/"))
    return found


def _has(image: Path, point: str) -> bool:
    return (image / point.lstrip("/")).exists()


def bundle_config(config: Mapping[str, Any], container: RankContainer, shown: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of the ranks' container, derived from the image's.

    SLURM replaces the arguments of the process, and adds the variables of the job.

    Source: https://github.com/opencontainers/runtime-spec/blob/v1.0.2/config.md.

    Args:
        config: of the image's bundle.
        container: of the ranks.
        shown: files and folders of the image, by their paths in the container.
    """
    found = {name: value for name, value in config.items() if name not in NOT_WITHOUT_NAMESPACES}
    root = {**config.get("root", {}), "path": ROOT}
    options = ["ro"] if root.get("readonly") else []
    of_image = [_bind(source, place, *options) for place, source in shown.items()]
    linux = {name: value for name, value in config.get("linux", {}).items() if name not in ("sysctl", "cgroupsPath")}
    linux["namespaces"] = [one for one in linux.get("namespaces", []) if one.get("type") in KEPT_NAMESPACES]
    process = {name: value for name, value in config.get("process", {}).items() if name != "rlimits"}
    process |= {"cwd": container.working_directory, "terminal": False}
    return {
        **found,
        "root": root,
        "linux": linux,
        "process": process,
        "mounts": [*of_image, *_mounts(config, linux, container)],
    }


def rank_words(config: Mapping[str, Any], container: RankContainer, command: Sequence[str]) -> list[str]:
    """Return the command of a rank, which finds out its place, and has the image's variables.

    Args:
        config: of the image's bundle.
        container: of the ranks.
        command: of a rank.
    """
    # the job's variables would replace those of the image, such as PATH
    own = [str(one) for one in config.get("process", {}).get("env", []) if "=" in str(one)]
    return ["/bin/sh", "-c", FIND_RANK, " ".join(container.nodes), *(["env", *own] if own else []), *command]


def _mounts(config: Mapping[str, Any], linux: Mapping[str, Any], container: RankContainer) -> list[dict[str, Any]]:
    given = [one for one in config.get("mounts", []) if one.get("destination") not in REPLACED]
    if any(one["type"] == "user" for one in linux["namespaces"]):
        # the kernel refuses new ones in a user namespace with the node's network and processes
        given = [_of_node(one) if one.get("type") in ("proc", "sysfs") else one for one in given]
    named = {one.get("destination") for one in given}
    own = [_bind(one, one) for one in ("/dev/shm", "/tmp") if one not in named]
    own += [_bind(one, one, "ro") for one in FROM_NODE if one not in named]
    own += [_bind(one.host, one.inside, *(["ro"] if one.is_read_only else [])) for one in container.mounts]
    return [*given, *own]


def _of_node(mount: Mapping[str, Any]) -> dict[str, Any]:
    place = str(mount["destination"])
    return _bind(place, place, *(["ro"] if mount.get("type") == "sysfs" else []))


def _bind(source: str, destination: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "none", "source": source, "options": ["rbind", *options]}
