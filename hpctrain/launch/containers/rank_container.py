"""The container of an attempt's ranks, as every engine has to start it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hpctrain.cluster.slurm_step import SlurmJob
from hpctrain.cluster.variables import Variables
from hpctrain.config.container import Mount
from hpctrain.errors import HpctrainError
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.code import CodeSnapshot


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
        step: str,
        environ: Mapping[str, str],
        given: Mapping[str, str],
        nodes: Sequence[str],
        code: CodeSnapshot | None = None,
    ) -> RankContainer | None:
        """Derive the container of an attempt; None if its ranks run outside of one.

        Args:
            plan: of the run.
            attempt: the attempt's number.
            step: name of the run's steps: other runs may share the job.
            environ: of the batch script.
            given: the variables of the step that hpctrain sets itself, name to value.
            nodes: of the ranks, in the order of the ranks if each has one.
            code: from which the ranks import; None for their working directory.
        """
        keys = plan.slurm.container
        if keys.image is None or keys.engine is None:
            return None
        job = SlurmJob.read(Variables(environ))
        name = f"{step}_{job.number}_{job.restart_count}"
        return cls(
            engine=keys.engine,
            image=keys.image,
            mounts=in_order(map(Mount.read, keys.mounts), needed_folders(plan, code)),
            working_directory=str(Path.cwd()),
            # an image may set its own search path
            variables={**{name: given[name] for name in ("PYTHONPATH",) if name in given}, **keys.env},
            from_node=tuple(sorted({*given, "CUDA_VISIBLE_DEVICES"} - {"PYTHONPATH"})),
            name=name,
            bundle=plan.directory.bundle(f"{name}_{attempt}"),
            nodes=tuple(nodes),
            user=environ.get("USER") or environ.get("SLURM_JOB_USER") or "user",
            has_gpus=bool(plan.resources.gpus_per_node),
        )


def needed_folders(plan: RunPlan, code: CodeSnapshot | None) -> list[Path]:
    """Return the folders of the node without which a rank of a run can't work."""
    found = [plan.directory.path, Path.cwd()]
    if code is not None:
        # the copy of a sweep's code is beside its runs, and links lead from a copy to large files of the original
        found += [code.folder.parent, code.root]
    return found


def in_order(wanted: Iterable[Mount], needed: Iterable[Path]) -> tuple[Mount, ...]:
    """Return the mounts that the user wants, and those of needed folders that aren't in them; parents come first."""
    found = list(wanted)
    for path in sorted(set(needed), key=lambda path: (len(path.parts), path)):
        if not any(_shows(mount, path) for mount in found):
            found.append(Mount(str(path), str(path)))
    return tuple(sorted(found, key=lambda mount: len(PurePosixPath(mount.inside).parts)))


def _shows(mount: Mount, path: Path) -> bool:
    """Whether a mount already shows a folder where it is on the node, to write there."""
    return mount.host == mount.inside and not mount.is_read_only and path.is_relative_to(mount.host)
