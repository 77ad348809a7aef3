"""Generate the reference page of the configuration from the schema:
``python tests/contracts/configuration_reference.py``.
"""

from __future__ import annotations

import itertools
from dataclasses import is_dataclass

from hpctrain.cli.help import own_fields, purpose_of
from hpctrain.config.cluster import Cluster, Container, Requeue, Slurm
from hpctrain.config.logger import MLflow, Wandb
from hpctrain.config.optimizer import NamedOptimizerKeys, NamedOptimizers
from hpctrain.config.paths import conf_dir
from hpctrain.config.root import GROUPS, LIST_GROUPS, Config, ProgramConfig, RunConfig

INSIDE = {schema.__name__: schema for schema in (Requeue, Container, Wandb, MLflow)}
"""Groups within groups, by the type of the field."""
HEAD = """\
# Configuration

This page is generated from the schema: `python tests/contracts/configuration_reference.py >
docs/reference/configuration.md`.

Change a key with `KEY=VALUE` on the command line, and choose an option of a group with `GROUP=OPTION`. Put your own
options into the folder `conf` where you type the command, or into one that you name with `--config-dir`, with a
subfolder per group: `conf/cluster/mysite.yaml` with `defaults: [slurm, _self_]` becomes the option `cluster=mysite`.
`python -m hpctrain --cfg job` prints the configuration that a command would use. An invalid value is refused with one
line and exit code 2, before anything is written or submitted. A key whose default is `???` has none: set it.
"""

PROGRAMS = """\
The run of a program, `python -m hpctrain run`, has the top-level keys `nodes`, `name`, `run_dir`, `run_mode`, `after`
and `after_failure`, the groups `cluster`, `code`, `health`, `notify`, `resume` and `run`, and:
"""


def _table(prefix: str, *schemas: type, leave_out: frozenset[str] = frozenset()) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in itertools.chain.from_iterable(map(own_fields, schemas)):
        if field.type in INSIDE:
            lines += _table(f"{prefix}{field.name}.", INSIDE[field.type])[2:-1]
        elif field.name not in leave_out:
            kind = field.type.replace("|", "\\|")
            meaning = field.text.replace("|", "\\|")
            lines.append(f"| `{prefix}{field.name}` | {kind} | `{field.default}` | {meaning} |")
    return [*lines, ""]


def _users(group: str, schema: str) -> str:
    """Return the options of a group that share a schema which isn't an option itself."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return ", ".join(path.stem for path in files if f"- base_{schema}\n" in path.read_text(encoding="utf-8"))


def reference() -> str:
    """Return the page."""
    lines = [HEAD, "## Top level", "", *_table("", RunConfig, Config, leave_out=frozenset(GROUPS))]
    lines += [PROGRAMS, *_table("", ProgramConfig, leave_out=frozenset(GROUPS))]
    for group, schemas in GROUPS.items():
        options = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
        lines += [
            f"## {group}",
            "",
            f"{purpose_of(next(iter(schemas.values())))} Options: {', '.join(f'`{name}`' for name in options)}.",
            "",
        ]
        for name, schema in schemas.items():
            if len(schemas) > 1:
                shown = f"[{name}]" if group in LIST_GROUPS else name if name in options else _users(group, name)
                lines += [f"### {group}={shown}", "", f"{(schema.__doc__ or '').strip()}", ""]
            declaring = [base for base in schema.__mro__ if is_dataclass(base)]
            if schema is Slurm:
                lines += ["All keys of `cluster=local`, and:", ""]
                declaring.remove(Cluster)
            prefix = f"{group}.{name}." if group in LIST_GROUPS else f"{group}."
            lines += _table(prefix, *declaring)
            if schema is NamedOptimizers:
                lines += ["Keys of an entry; its other keys are arguments of its class:", ""]
                lines += _table(
                    "optimizer.named.NAME.", *(base for base in NamedOptimizerKeys.__mro__ if is_dataclass(base))
                )
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")
