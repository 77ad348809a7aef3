"""Send runs to Weights & Biases or MLflow.

examples:
  python -m hpctrain sync digits                      # to the services that the run enables
  python -m hpctrain sync sweep --service wandb       # every run under runs/sweep, to W&B
  python -m hpctrain sync digits --follow             # until the run ends
  python -m hpctrain sync digits --service wandb --offline
  python -m hpctrain sync digits --server http://login1:5000

What lies before the newest checkpoint is sent, and everything of a completed run. Nothing is sent twice, whoever sent
it, and however often. The API key comes from the environment or from ~/.netrc (`wandb login`). If other users can write
the run's config.yaml, or it is theirs, the server of MLflow that it names gets nothing unless --server or
MLFLOW_TRACKING_URI names it as well. Links in the run's folder aren't followed.

Exit code 0; 1 if a service can't be reached or refuses, or if another process sends the run; 2 if RUN is not a run, or
enables no service, or if you have to name its server.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hpctrain.cli.arguments import add_runs, chosen_runs, command_parser
from hpctrain.config.logger import SERVICES, MLflow
from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError, RunDirectoryError
from hpctrain.files import open_below
from hpctrain.run.directory import RunDirectory
from hpctrain.sync.sender_processes import Parent
from hpctrain.sync.service import problem_text
from hpctrain.sync.transfer import Transfer, follow, send_during_training, send_once

AT_ONCE = 4
"""Runs that are sent at the same time, each by a process of its own."""
LEAVE_S = 15
"""Seconds in which the sender process of a training that was stopped finishes, before it is killed."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Send runs; ``arguments`` are those after `sync`."""
    parser = command_parser("sync", __doc__)
    add_runs(parser, nargs="+")
    parser.add_argument("--service", choices=SERVICES, help="the service (default: those that the run enables)")
    parser.add_argument("--follow", "-f", action="store_true", help="keep sending until the run ends")
    meaning = "also send what lies after the newest checkpoint of a run that has stopped"
    parser.add_argument("--all", action="store_true", help=meaning)
    meaning = "the server of MLflow, in place of the one that the run names"
    parser.add_argument("--server", metavar="ADDRESS", help=meaning)
    parser.add_argument("--offline", action="store_true", help="write W&B's offline files into RUN/sync/wandb instead")
    # rank zero's: with it, standard input is a pipe to the training
    parser.add_argument("--sender-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.offline and options.service not in (None, "wandb"):
        parser.error("--offline writes files of W&B: use --service wandb")
    if options.server is not None:
        if options.offline or options.service not in (None, "mlflow"):
            parser.error("--server names a server of MLflow: use --service mlflow")
        MLflow(tracking_uri=options.server)
        options.service = "mlflow"
    transfer = partial(Transfer, offline=options.offline, everything=options.all, server=options.server)
    transfers = [
        transfer(directory=directory, service=service)
        for directory in chosen_runs(options)
        for service in _services(directory, options)
    ]
    if options.sender_process:
        _send_during_training(transfers[0])
    if len(transfers) == 1:
        return _send(transfers[0], options)
    with ThreadPoolExecutor(AT_ONCE) as senders:
        codes = list(senders.map(lambda transfer: _send_apart(transfer, options), transfers))
    return max(codes, default=ExitCode.FINISHED)


def _services(directory: RunDirectory, options: argparse.Namespace) -> Sequence[str]:
    open_below(directory.path, directory.config.name).close()  # refuses a link
    if options.service is not None:
        return [options.service]
    logger = read_plain_config(directory.config).get("logger")
    groups = logger if isinstance(logger, dict) else {}
    enabled = [name for name in SERVICES if isinstance(group := groups.get(name), dict) and group.get("enabled")]
    if not enabled:
        raise RunDirectoryError(f"{directory.path} enables no service; name one: --service {' or '.join(SERVICES)}")
    return [name for name in enabled if name == "wandb"] if options.offline else enabled


def _send(transfer: Transfer, options: argparse.Namespace) -> int:
    try:
        transfer.require_trusted()
        with transfer.directory.permissions():
            return follow(transfer) if options.follow else send_once(transfer)
    except (HpctrainError, OSError, KeyboardInterrupt) as error:
        if "wandb" not in sys.modules:
            raise
        # at the exit of the process, wandb's client would wait for an upload that has failed
        code = _report(transfer, error)
        sys.stdout.flush()
        os._exit(code)


def _report(transfer: Transfer, error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    print(f"{ERROR_PREFIX}{transfer.shown}: {problem_text(error)}", file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, HpctrainError) else ExitCode.FAILED


def _send_apart(transfer: Transfer, options: argparse.Namespace) -> int:
    # a process for each: wandb's client has one run at a time, and one service must not hold up another
    command = [sys.executable, "-m", "hpctrain", "sync", str(transfer.directory.path), "--service", transfer.service]
    flags = {"--follow": options.follow, "--all": options.all, "--offline": options.offline}
    command += [flag for flag, is_set in flags.items() if is_set]
    if transfer.server is not None:
        command += ["--server", transfer.server]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def _send_during_training(transfer: Transfer) -> None:
    """Send in the background of a training, and exit."""
    for number in STOP_SIGNALS:
        # the scheduler's and the user's signals are for the training, which closes the pipe when it leaves
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    pipe = os.dup(0)
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is needed, and wandb may ask on standard input
        os.dup2(nothing.fileno(), 0)
    parent = Parent(pipe, on_left=lambda: signal.alarm(LEAVE_S))
    code = send_during_training(transfer, parent)
    sys.stdout.flush()
    os._exit(code)
