"""The container of an attempt's ranks, and the engines that start it.

A new engine is a function and a line of `ENGINES` here, and its name in `ENGINE_NAMES` of `hpctrain.config.cluster`,
where `Container` and `check_container` refuse what the engine can't do. How it reports that it can't start a container
is in `attempt.rank_python.NO_CONTAINER`.

The tests run Charliecloud and OCI, with an image made of bind mounts. The lines of Pyxis and Apptainer are only frozen
by tests, and no engine has run with a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.cluster.slurm_step import JobVariables
from hpctrain.cluster.variables import Variables
from hpctrain.config.cluster import Mount
from hpctrain.errors import HpctrainError
from hpctrain.files import describe_os_error, read_json, write_json
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.code import CodeSnapshot

CHARLIECLOUD_ENVIRONMENT = "ch/environment"
"""The file of an image of Charliecloud with the variables that its Dockerfile sets."""
BUNDLE_REMEDY = "unpack the image into a bundle, such as with umoci, and name its folder"
BUNDLE_CONFIG = "config.json"
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


class ContainerError(HpctrainError):
    """A container that can't be prepared on this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContainer:
    """The container of the ranks of one attempt, derived once from its run.

    Attributes:
        engine: starts it.
        image: a path, or a name that the engine knows.
        mounts: what the ranks see of the node, folders before what is in them.
        working_directory: of the ranks.
        variables: which the ranks have whatever the image sets, name to value.
        from_node: names of variables of the step that have to win over the image's own.
        name: of the container, with the run, the job's id and its number of requeues: a node may still have the
            one of a job that was killed (Pyxis' issue 161).
        bundle: the folder for a description of the container, for engines that need one.
        nodes: of the ranks, in rank order.
        user: name of the user who runs the ranks.
        has_gpus: whether the ranks are to see GPUs.
    """

    engine: str
    image: str
    mounts: tuple[Mount, ...]
    working_directory: str
    variables: Mapping[str, str]
    from_node: tuple[str, ...]
    name: str
    bundle: Path
    nodes: tuple[str, ...]
    user: str
    has_gpus: bool

    @classmethod
    def of_attempt(
        cls,
        plan: RunPlan,
        attempt: int,
        *,
        environ: Mapping[str, str],
        step_variables: Mapping[str, str],
        nodes: Sequence[str],
        code: CodeSnapshot | None = None,
    ) -> RankContainer | None:
        """Derive the container of an attempt; None if its ranks run outside of one.

        Args:
            plan: of the run.
            attempt: the attempt's number.
            environ: of the batch script.
            step_variables: the variables of the step that hpctrain sets itself, name to value.
            nodes: of the ranks, in the order of the ranks if each has one.
            code: from which the ranks import; None for their working directory.
        """
        keys = plan.slurm.container
        if keys.image is None or keys.engine is None:
            return None
        job = JobVariables.read(Variables(environ))
        name = f"{plan.directory.step_name}_{job.number}_{job.restart_count}"
        return cls(
            engine=keys.engine,
            image=keys.image,
            mounts=in_order(map(Mount.read, keys.mounts), needed_folders(plan, code)),
            working_directory=str(Path.cwd()),
            # an image may set its own search path
            variables={**{name: value for name, value in step_variables.items() if name == "PYTHONPATH"}, **keys.env},
            from_node=tuple(sorted({*step_variables, "CUDA_VISIBLE_DEVICES"} - {"PYTHONPATH"})),
            name=name,
            bundle=plan.directory.bundle(f"{name}_{attempt}"),
            nodes=tuple(nodes),
            user=environ.get("USER") or environ.get("SLURM_JOB_USER") or "user",
            has_gpus=bool(plan.resources.gpus_per_node),
        )

    def enter(self, command: Sequence[str]) -> tuple[list[str], list[str]]:
        """Prepare the container, and return how srun starts a rank in it.

        Args:
            command: of a rank, as it is outside of a container.

        Returns:
            Further options for srun, and the command that srun executes.

        Raises:
            ContainerError: the image can't be used.
            OSError: the file system is unavailable.
        """
        # env(1) and not the engines' own options: Apptainer splits values at commas, Charliecloud replaces $NAME, and
        # Pyxis takes no values
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return ENGINES[self.engine](self, ["env", *variables, *command] if variables else list(command))


def needed_folders(plan: RunPlan, code: CodeSnapshot | None) -> list[Path]:
    """Return the folders of the node without which a rank of a run can't work."""
    # not hpctrain's package: in the image its dependencies would be missing, or of another version
    folders = [plan.directory.path, Path.cwd()]
    # the copy of a sweep's code is beside its runs, and links lead from a copy to large files of the original
    return folders if code is None else [*folders, code.folder.parent, code.root]


def in_order(users: Iterable[Mount], needed: Iterable[Path]) -> tuple[Mount, ...]:
    """Return the user's mounts, and those of needed folders that aren't in them; parents come first."""
    mounts = list(users)
    for path in sorted(set(needed), key=lambda path: (len(path.parts), path)):
        if not any(_shows(mount, path) for mount in mounts):
            mounts.append(Mount(str(path), str(path)))
    return tuple(sorted(mounts, key=lambda mount: len(PurePosixPath(mount.inside).parts)))


def _shows(mount: Mount, path: Path) -> bool:
    """Whether a mount already shows a folder where it is on the node, to write there."""
    return mount.host == mount.inside and not mount.is_read_only and path.is_relative_to(mount.host)


def apptainer(container: RankContainer, command: list[str]) -> tuple[list[str], list[str]]:
    """Start it with Apptainer, formerly Singularity.

    Source: https://apptainer.org/docs/user/latest/cli/apptainer_exec.html.
    """
    line = ["apptainer", "exec"]
    if container.has_gpus:
        line.append("--nv")
    for mount in container.mounts:
        line += ["--bind", _with_mode(mount)]
    return [], [*line, "--pwd", container.working_directory, container.image, *command]


def pyxis(container: RankContainer, command: list[str]) -> tuple[list[str], list[str]]:
    """Start it with Pyxis, NVIDIA's plugin of srun, which starts Enroot's containers.

    Source: https://github.com/NVIDIA/pyxis/blob/master/README.md.

    The container has a name, so that a node imports the image once for all of its ranks, and for all attempts of a job
    before its next requeue.
    """
    options = [
        f"--container-image={container.image}",
        f"--container-name={container.name}",
        f"--container-mounts={','.join(map(_with_mode, container.mounts))}",
        f"--container-workdir={container.working_directory}",
        # all others reach the ranks as well, unless the image sets them
        f"--container-env={','.join(container.from_node)}",
    ]
    return options, command


def _with_mode(mount: Mount) -> str:
    return f"{mount.host}:{mount.inside}{':ro' if mount.is_read_only else ''}"


def charliecloud(container: RankContainer, command: list[str]) -> tuple[list[str], list[str]]:
    """Start it with Charliecloud, whose ch-run needs no privileges.

    Raises:
        ContainerError: the image is a folder that lacks a mount's, and that this user can't write.
    """
    image = Path(container.image)
    is_folder = image.is_absolute() and image.is_dir()
    if is_folder:
        _make_mount_points(container, image)
    return [], ch_run(container, command, sets_variables=is_folder and (image / CHARLIECLOUD_ENVIRONMENT).is_file())


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
    for mount in container.mounts:
        line += ["--bind", f"{mount.host}:{mount.inside}"]
    return [*line, "--cd", container.working_directory, container.image, "--", *command]


def _make_mount_points(container: RankContainer, image: Path) -> None:
    """Make folders that ch-run can't: it sees the image read-only, and with --write the ranks could change it."""
    parents: list[str] = []
    for mount in container.mounts:
        point = image / mount.inside.lstrip("/")
        # what is inside of another mount is on the node, and already there
        if not any(map(Path(mount.inside).is_relative_to, parents)) and not point.exists():
            _make(point, Path(mount.host))
        parents.append(mount.inside)


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


def oci(container: RankContainer, command: list[str]) -> tuple[list[str], list[str]]:
    """Start it with SLURM's own `srun --container`: the site's oci.conf names the runtime, such as runc.

    If the task started runc itself, SLURM would not know the container, and couldn't end it.

    Raises:
        ContainerError: the image isn't a bundle.
        OSError: the bundle can't be written.
    """
    image = Path(container.image)
    try:
        config = read_json(image / BUNDLE_CONFIG)
    except (OSError, HpctrainError) as error:
        raise _not_a_bundle(describe_os_error(error) if isinstance(error, OSError) else str(error)) from error
    root = image / config.get("root", {}).get("path", ROOT)
    if not root.is_dir():
        raise _not_a_bundle(f"it has no folder {root}")
    contents = make_root(container.bundle / ROOT, root, [mount.inside for mount in container.mounts])
    write_json(container.bundle / BUNDLE_CONFIG, bundle_config(config, container, contents))
    return [f"--container={container.bundle}"], rank_words(config, container, command)


def _not_a_bundle(problem: str) -> ContainerError:
    return ContainerError(f"cluster.container.image is not a bundle: {problem}; {BUNDLE_REMEDY}")


def make_root(root: Path, image: Path, points: Sequence[str]) -> dict[str, str]:
    """Make the root folder of the ranks, so that the image can be mounted in it and needs no folders for other mounts.

    Args:
        root: the folder to make.
        image: the image's root.
        points: where else something will be mounted.

    Returns:
        The files and folders of the image that have to be mounted, by their paths in the container.
    """
    contents: dict[str, str] = {}

    def lay_out(folder: Path, inside: PurePosixPath) -> None:
        copy = root / str(inside).lstrip("/")
        copy.mkdir(parents=True, exist_ok=True)
        for entry in sorted(folder.iterdir()):
            place = inside / entry.name
            below = [point.lstrip("/") for point in points if PurePosixPath(point).is_relative_to(place)]
            if entry.is_symlink():
                with contextlib.suppress(FileExistsError):
                    (copy / entry.name).symlink_to(entry.readlink())
            elif entry.is_dir() and not all((image / point).exists() for point in below):
                lay_out(entry, place)
            elif str(place) not in KERNEL:
                contents[str(place)] = str(entry)

    lay_out(image, PurePosixPath("/"))
    return contents


def bundle_config(config: Mapping[str, Any], container: RankContainer, contents: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of the ranks' container, derived from the image's.

    SLURM replaces the arguments of the process, and adds the variables of the job.

    Source: https://github.com/opencontainers/runtime-spec/blob/v1.0.2/config.md.

    Args:
        config: of the image's bundle.
        container: of the ranks.
        contents: files and folders of the image, by their paths in the container.
    """
    fields = {name: value for name, value in config.items() if name not in NOT_WITHOUT_NAMESPACES}
    root = {**config.get("root", {}), "path": ROOT}
    of_image = [_bind(source, place, read_only=bool(root.get("readonly"))) for place, source in contents.items()]
    linux = {name: value for name, value in config.get("linux", {}).items() if name not in ("sysctl", "cgroupsPath")}
    linux["namespaces"] = [space for space in linux.get("namespaces", []) if space.get("type") in KEPT_NAMESPACES]
    process = {name: value for name, value in config.get("process", {}).items() if name != "rlimits"}
    process |= {"cwd": container.working_directory, "terminal": False}
    return {
        **fields,
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
    variables = [text for text in map(str, config.get("process", {}).get("env", [])) if "=" in text]
    words = ["env", *variables] if variables else []
    return ["/bin/sh", "-c", FIND_RANK, " ".join(container.nodes), *words, *command]


def _mounts(config: Mapping[str, Any], linux: Mapping[str, Any], container: RankContainer) -> list[dict[str, Any]]:
    mounts = [mount for mount in config.get("mounts", []) if mount.get("destination") not in REPLACED]
    if any(space["type"] == "user" for space in linux["namespaces"]):
        # the kernel refuses new ones in a user namespace with the node's network and processes
        mounts = [_of_node(mount) if mount.get("type") in ("proc", "sysfs") else mount for mount in mounts]
    places = {mount.get("destination") for mount in mounts}
    mounts += [_bind(place, place) for place in ("/dev/shm", "/tmp") if place not in places]
    mounts += [_bind(place, place, read_only=True) for place in FROM_NODE if place not in places]
    return mounts + [_bind(mount.host, mount.inside, read_only=mount.is_read_only) for mount in container.mounts]


def _of_node(mount: Mapping[str, Any]) -> dict[str, Any]:
    place = str(mount["destination"])
    return _bind(place, place, read_only=mount.get("type") == "sysfs")


def _bind(source: str, destination: str, *, read_only: bool = False) -> dict[str, Any]:
    options = ["rbind", "ro"] if read_only else ["rbind"]
    return {"destination": destination, "type": "none", "source": source, "options": options}


ENGINES: Mapping[str, Callable[[RankContainer, list[str]], tuple[list[str], list[str]]]] = {
    "apptainer": apptainer,
    "charliecloud": charliecloud,
    "oci": oci,
    "pyxis": pyxis,
}
"""What starts a rank in its container, by the engine's name in `cluster.container.engine`: each prepares the container,
and returns options for srun, and the command that srun executes in place of the rank's."""
