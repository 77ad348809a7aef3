"""Print the rank, the world size and the addresses that a process started here would derive from its
environment variables, and the variables themselves. Nothing is started, and SLURM isn't needed.

examples, run where the training would run:
  python -m hpctrain env
  srun --nodes=2 --ntasks-per-node=4 --label python -m hpctrain env
  torchrun --nproc-per-node=2 -m hpctrain env --json

Exit code 0; 2 if the variables contradict each other, with the ones to unset.
"""  # noqa: D205 - the text of `env --help`

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hpctrain.cli.arguments import command_parser
from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.config.visible_gpus import VISIBLE_DEVICES, listed_gpus
from hpctrain.errors import ClusterEnvironmentError


def main(arguments: list[str]) -> int:
    """Print the cluster environment; ``arguments`` are those after `env`."""
    parser = command_parser("env", __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    as_json = parser.parse_args(arguments).json
    try:
        report = _report(os.environ)
    except ClusterEnvironmentError as error:
        if as_json:
            print(json.dumps({"error": str(error), "variables": error.variables}))
        else:
            print(error, file=sys.stderr)
        return int(error.exit_code)
    print(json.dumps(report) if as_json else _table(report))
    return 0


def _report(variables: Mapping[str, str]) -> dict[str, Any]:
    environment = ClusterEnvironment.from_environment(variables)
    device_variables = {name: variables[name] for name in VISIBLE_DEVICES if name in variables}
    return {
        "hostname": socket.gethostname(),
        "is_rank": is_rank(variables),
        "gpus_visible": listed_gpus(variables),
        "environment": {
            item.name: getattr(environment, item.name)
            for item in fields(environment)
            if item.name not in {"variables", "unparsable"}
        },
        "variables": dict(sorted({**environment.variables, **device_variables}.items())),
        "unparsable": dict(environment.unparsable),
    }


def _table(report: dict[str, Any]) -> str:
    gpus = report["gpus_visible"]
    rows = {
        "hostname": report["hostname"],
        "is a rank": "yes" if report["is_rank"] else "no: training started here would launch its own ranks",
        "gpus visible": "all of this node's (CUDA_VISIBLE_DEVICES is not set)" if gpus is None else gpus,
    }
    rows |= {name: _text(value) for name, value in report["environment"].items()}
    derived = "\n".join(f"  {name:<18}  {value}" for name, value in rows.items())
    notes = dict.fromkeys(report["unparsable"], "  (ignored: it can't be parsed)")
    lines = (f"  {name}={value}{notes.get(name, '')}" for name, value in report["variables"].items())
    variables = "\n".join(lines) or "  (none)"
    return f"derived\n{derived}\nfrom\n{variables}"


def _text(value: object) -> str:
    if value is None or value == ():
        return "-"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
