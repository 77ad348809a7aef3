"""The site file: what worked, as an option of `cluster`."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpctrain.config.cluster import Container, Requeue, Slurm
from hpctrain.config.gpu_request import FORMS
from hpctrain.doctor.folder import OWN_OPTIONS, DoctorJobRecord
from hpctrain.doctor.nodes import NO_PLUGIN
from hpctrain.phrases import all_of, listed, on_one_line
from hpctrain.scheduler.settings import Partition

FOLDER = Path("conf") / "cluster"
"""Where options of a user's own are found, below the folder where commands are typed."""
LEFT_OUT = frozenset({"kind", "wait", "dry_run", "master_port", "min_nodes", "spare_nodes"})
"""Keys that belong to a command, not to a site."""


def site_name(cluster: str) -> str:
    """A name for the option, from that of the cluster."""
    name = re.sub(r"[^a-z0-9_]+", "_", cluster.lower()).strip("_") or "site"
    return f"{name}_site" if name in OWN_OPTIONS else name


@dataclass(frozen=True, slots=True)
class Change:
    """A key that the examination adds to those that were typed.

    Attributes:
        key: below `cluster`.
        value: that works.
        reason: for a comment.
    """

    key: str
    value: Any
    reason: str


def site_changes(cluster: Slurm, partition: Partition | None, record: DoctorJobRecord) -> list[Change]:
    """Return the changes that make a request work.

    Args:
        cluster: of the request.
        partition: in which its job ran; None if unknown.
        record: of the job.
    """
    changes = []
    if partition is not None and cluster.partition is None:
        changes.append(Change("partition", partition.name, "the cluster's default"))
    limit = None if partition is None else partition.max_time_min
    if limit is not None and cluster.time_limit_min > limit:
        changes.append(Change("time_limit_min", limit, "the most that the partition allows"))
    if record.plugin_refused:
        options = [*cluster.srun_args, NO_PLUGIN]
        changes.append(Change("srun_args", options, "the MPI plugin that srun takes by default can't be loaded"))
    # one that answered too late may only be slow
    answered = [node for node in record.nodes if node in record.answers and record.answers[node].ended]
    if bad := [node for node in answered if node not in record.rank_nodes]:
        names = ",".join([*filter(None, [cluster.exclude]), *bad])
        reason = f"ranks couldn't start on {listed(bad)}; remove it once that is mended"
        changes.append(Change("exclude", names, reason))
    return changes


def site_keys(cluster: Slurm, changes: Sequence[Change]) -> dict[str, Any]:
    """The keys that differ from hpctrain's defaults, with their values.

    Args:
        cluster: of the examined request.
        changes: to it.
    """
    usual = Slurm()
    non_defaults = {
        field.name: getattr(cluster, field.name)
        for field in dataclasses.fields(cluster)
        if field.name not in LEFT_OUT and getattr(cluster, field.name) != getattr(usual, field.name)
    }
    keys = {**non_defaults, **{change.key: change.value for change in changes}}
    return {
        name: dataclasses.asdict(value) if isinstance(value, Requeue | Container) else value
        for name, value in keys.items()
    }


def gpu_requests(cluster: Slurm, types: Sequence[str]) -> Iterator[Slurm]:
    """Yield the requests of GPUs to try, the user's first; or one per type, if there are several and none is set.

    Args:
        cluster: of the request; keys that it sets are kept.
        types: of the GPUs of the nodes.
    """
    forms = FORMS if cluster.gpu_request is None else (cluster.gpu_request,)
    names: Sequence[str | None] = (cluster.gpu_type,)
    if cluster.gpu_type is None and types:
        names = types if len(types) > 1 else (None, *types)
    for form, name in itertools.product(forms, names):
        usual = cluster.gpu_request is None and form == FORMS[0]
        yield dataclasses.replace(cluster, gpu_request=None if usual else form, gpu_type=name)


def gpu_changes(typed: Slurm, accepted: Slurm) -> list[Change]:
    """Return the keys that a request of GPUs needed.

    Args:
        typed: by the user.
        accepted: by sbatch.
    """
    reasons = {
        "gpu_type": "the first of the nodes' types that sbatch accepts",
        "gpu_request": "the first form that sbatch accepts",
    }
    return [
        Change(key, getattr(accepted, key), reason)
        for key, reason in reasons.items()
        if getattr(accepted, key) != getattr(typed, key)
    ]


def gpu_remarks(cluster: Slurm, types: Sequence[str]) -> list[str]:
    """Return the comment on the types of GPUs; none if the request has no GPUs, or the nodes have no types.

    Args:
        cluster: of the request.
        types: of the nodes, described.
    """
    request = cluster.gpus
    if not request.count or not types:
        return []
    key = f"{request.type_key}={request.type_value('TYPE')}" if request.is_in_gres else request.type_key
    return [f"values of {key} here: {all_of(types)}"]


def site_text(keys: Mapping[str, Any], command: str, changes: Sequence[Change], remarks: Sequence[str] = ()) -> str:
    """The file.

    Args:
        keys: of the cluster.
        command: the command that made it.
        changes: the keys that the user didn't type, with their reasons.
        remarks: further comments.
    """
    lines = [f"# Written on {time.strftime('%Y-%m-%d')} by `{on_one_line(command)}`; change it as you like."]
    lines += [on_one_line(f"# {change.key}: {change.reason}") for change in changes]
    lines += [on_one_line(f"# {remark}") for remark in remarks]
    lines += ["defaults:", "  - slurm", "  - _self_"]
    if keys:
        lines += ["", yaml.safe_dump(dict(keys), sort_keys=False, default_flow_style=False).rstrip("\n")]
    return "\n".join(lines) + "\n"
