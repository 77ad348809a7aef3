"""The GPUs that a job requests of each node, and the form in which sbatch is asked for them."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import ConfigError, SchedulerError
from hpctrain.phrases import counted
from hpctrain.scheduler.gres import Gpus, gpus_of

FORMS = ("gpus_per_node", "gres", "gpus_per_task_type")
"""Values of cluster.gpu_request, the usual one first."""
GRES = "cluster.sbatch.gres"
MAX_GPUS = 65_535
"""The most of a node, whose processors SLURM counts in 16 bits."""
MAX_BARE_NUMBER = 99
"""The largest number of GPUs that isn't taken for a type, such as 3090, whose number was forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """The GPUs that a job requests of each node.

    Attributes:
        count: of each node; None if the user set no number.
        types: as the site's gres.conf names them; empty for any.
        form: one of `FORMS`.
        gres: the value of cluster.sbatch.gres: all of the GPUs, or none of them.
        is_in_gres: whether `gres` has the GPUs.
    """

    count: int | None
    types: tuple[str, ...] = ()
    form: str = FORMS[0]
    gres: str = ""
    is_in_gres: bool = False

    @classmethod
    def of_keys(
        cls, *, gpus_per_node: int | None, gpu_type: str | None, gpu_request: str | None, gres: str
    ) -> GpuRequest:
        """Read the keys of cluster=slurm.

        Args:
            gpus_per_node: the key.
            gpu_type: the key.
            gpu_request: the key.
            gres: the value of cluster.sbatch.gres; empty without one.

        Raises:
            ConfigError: `gres` can't be parsed, or has GPUs that another key requests, too; or a type has no number.
        """
        form = gpu_request or FORMS[0]
        if gpus := _gpus_in(gres):
            others = {"gpus_per_node": gpus_per_node, "gpu_type": gpu_type, "gpu_request": gpu_request}
            for name, value in others.items():
                if value not in (None, "gres"):
                    problem = f"requests GPUs, and cluster.{name}={value} is set, too"
                    remedy = f"to keep the gres, set cluster.{name}=null; to remove all of it, ~{GRES}"
                    raise ConfigError(GRES, gres, problem, remedy)
            types = tuple(part.gpu_type for part in gpus if part.gpu_type)
            return cls(count=sum(part.count for part in gpus), types=types, form="gres", gres=gres, is_in_gres=True)
        if gpu_type is not None and gpus_per_node is None:
            remedy = "set cluster.gpus_per_node=N, or cluster.gpu_type=null"
            raise ConfigError("cluster.gpu_type", gpu_type, "has no effect on a run that requests no GPUs", remedy)
        # 0 also switches off the type that a site file sets
        types = (gpu_type,) if gpu_type is not None and gpus_per_node else ()
        return cls(count=gpus_per_node, types=types, form=form, gres=gres)

    def check(self, tasks_per_node: int, *, has_min_nodes: bool) -> None:
        """Refuse GPUs per task that can't be expressed.

        Args:
            tasks_per_node: of the job.
            has_min_nodes: whether the job may start with one of several numbers of nodes.

        Raises:
            ConfigError: the job has no number of tasks, or the tasks can't share the GPUs of a node.
        """
        if self.form != "gpus_per_task_type" or not self.count:
            return
        remedy = "choose gpus_per_node or gres"
        if has_min_nodes:
            # 22.05 and 26.05: "--gpus-per-task used without either --gpus or -n/--ntasks is not allowed"
            problem = "needs a number of tasks, which a job with cluster.min_nodes doesn't have"
            raise ConfigError("cluster.gpu_request", self.form, problem, f"{remedy}, or set cluster.min_nodes=null")
        if self.count % tasks_per_node:
            problem = f"can't divide the {counted(self.count, 'GPU')} of a node among {counted(tasks_per_node, 'task')}"
            raise ConfigError("cluster.gpu_request", self.form, problem, remedy)

    def sbatch_options(self, tasks_per_node: int) -> dict[str, str]:
        """Return the options of sbatch that request the GPUs, and what else is in the gres.

        Args:
            tasks_per_node: of the job.
        """
        parts, options = [self.gres] if self.gres else [], dict[str, str]()
        if self.count and not self.is_in_gres:
            prefix = "".join(f"{gpu_type}:" for gpu_type in self.types)
            if self.form == "gres":
                # sbatch refuses none beside others
                parts = [*(part for part in parts if part != "none"), f"gpu:{prefix}{self.count}"]
            elif self.form == "gpus_per_task_type":
                options["gpus-per-task"] = f"{prefix}{self.count // tasks_per_node}"
            else:
                options["gpus-per-node"] = f"{prefix}{self.count}"
        return {**options, "gres": ",".join(parts)} if parts else options

    @property
    def setting(self) -> tuple[str, object]:
        """The key that requests the GPUs, and its value."""
        return (GRES, self.gres) if self.is_in_gres else ("cluster.gpus_per_node", self.count)

    @property
    def cpu_remedy(self) -> str:
        """What to type to train on the CPU."""
        return f"type ~{GRES}" if self.is_in_gres else "set cluster.gpus_per_node=0"

    @property
    def type_key(self) -> str:
        """The key that names the type."""
        return GRES if self.is_in_gres else "cluster.gpu_type"

    def type_value(self, gpu_type: str) -> str:
        """What to write there for a type."""
        return f"gpu:{gpu_type}:{self.count}" if self.is_in_gres else gpu_type

    def unknown_type(self, gpu_type: str, problem: str, remedy: str) -> ConfigError:
        """The error on a type that the site doesn't have, about the key that names it.

        Args:
            gpu_type: one of `types`.
            problem: what is wrong with it.
            remedy: what to set instead.
        """
        if self.is_in_gres:
            return ConfigError(self.type_key, self.gres, f"{gpu_type} {problem}", remedy)
        return ConfigError(self.type_key, gpu_type, problem, remedy)


def _gpus_in(gres: str) -> tuple[Gpus, ...]:
    try:
        gpus = gpus_of(gres)
    except SchedulerError as error:
        raise ConfigError(GRES, gres, str(error), "write them as for sbatch --gres") from error
    if gpus and "(" in gres:
        raise ConfigError(GRES, gres, "is how scontrol prints a node's GPUs", "leave (...) out, as sbatch demands")
    for part in gpus:
        if part.count > MAX_GPUS:
            raise ConfigError(GRES, gres, f"expected at most {MAX_GPUS} GPUs", "write a smaller number")
        if not part.gpu_type and part.count > MAX_BARE_NUMBER:
            problem, number = f"requests {part.count} GPUs of any type", part.count
            raise ConfigError(GRES, gres, problem, f"a type needs a number, too: write gpu:{number}:1")
    types = [part.gpu_type for part in gpus]
    if "" in types and any(types):
        problem = "has GPUs with and without a type, which SLURM refuses"
        raise ConfigError(GRES, gres, problem, "write a type for all, such as gpu:a100:2")
    if len(set(types)) < len(types):  # 22.05 and 26.05 grant one GPU for gpu:a100:1,gpu:a100:1
        raise ConfigError(
            GRES, gres, "names the same GPUs twice, and SLURM counts them once", "write such as gpu:a100:2"
        )
    return gpus
