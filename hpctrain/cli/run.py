"""Launch any program as the ranks of a run: here, as a job, or as an array.

examples:
  python -m hpctrain run -- python train.py --lr 3e-4
  python -m hpctrain run cluster=slurm nodes=4 cluster.gpus_per_node=8 -- python train.py
  python -m hpctrain run cluster=slurm nodes=4 run.processes=node cluster.processes_per_node=8 -- torchrun train.py
  python -m hpctrain run -m cluster=slurm args.lr=1e-3,1e-4 -- python train.py --lr {args.lr}
  python -m hpctrain run cluster=slurm -- bash long.sh

The command is started once per rank, with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) and
HPCTRAIN_RUN_DIR, HPCTRAIN_CHECKPOINT_DIR, HPCTRAIN_ATTEMPT and HPCTRAIN_SUBMIT_DIR. It runs in a copy of the code that
is made now.

At a preemption and before the time limit the command gets SIGTERM (run.signal). If it ends then, even with exit code 0,
the run is requeued, and the same command starts again: it should save at the signal, and continue from what it saved.
Without such a signal, exit code 0 means that the run is completed, and any other code that it failed.

A program reports its progress with four lines: `from hpctrain import session`, session.start(total_steps=N),
session.step(STEP, {"loss": LOSS}) after each step, and session.saved(STEP, PATH) after each save.

`--cfg` prints the configuration. status, logs, cancel, resume, stacks and drill work as for hpctrain's own trainings.

The pages on programs, on reporting and on the copy of the code:
  docs/how_to/programs.md
  docs/reference/session.md
  docs/how_to/code.md

Exit code: the run's; 0 once it is submitted; 2 for a configuration that can't work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpctrain.cli.arguments import add_overrides, command_parser
from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.config.command import INTERPRETERS, refuse_missing_script
from hpctrain.config.program import split_command
from hpctrain.config.root import ProgramConfig
from hpctrain.errors import ConfigError, ExitCode
from hpctrain.streams import print_warning


def main(arguments: list[str]) -> int:
    """Launch a program; ``arguments`` are those after `run`.

    Raises:
        ConfigError: there is no command, or the configuration is invalid; or a launcher started this process.
    """
    words, command = split_command(arguments)
    options = _parse(words, command if "--" in arguments else None)
    if is_rank(os.environ) and not options.cfg:
        _refuse_rank()
    from hpctrain.config.compose import ProgramComposer

    composer = ProgramComposer(command, options.config_dir)
    hpctrain_command = ["python", "-m", "hpctrain", "run", *arguments]
    if options.cfg:
        from hpctrain.config.stored import to_yaml

        print(to_yaml(composer.compose_run(options.overrides)), end="")
        return ExitCode.FINISHED
    refuse_missing_script(command, print_warning)
    if options.multirun:
        from hpctrain.search.multirun import multirun

        return multirun(composer, options.overrides, hpctrain_command)
    from hpctrain.launch.launcher import launch

    return launch(composer.compose_run(options.overrides), hpctrain_command)


def _refuse_rank() -> NoReturn:
    environment = ClusterEnvironment.from_environment(os.environ)
    problem = f"a process that {environment.source} started can't start ranks: type it without {environment.source}"
    instead = "in a batch script of your own, write python -m hpctrain.supervise KEY=VALUE ... -- COMMAND"
    error = ConfigError("run", f"rank {environment.rank} of {environment.world_size}", problem, instead)
    if environment.rank:
        from hpctrain.cli.train import wait_for_rank_zero  # imports Hydra

        wait_for_rank_zero(error.exit_code)
        sys.exit(error.exit_code)
    raise error


def _parse(words: list[str], command: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("run", __doc__)
    parser.usage = "python -m hpctrain run [-h] [-m] [--cfg] [--config-dir FOLDER] [KEY=VALUE ...] -- COMMAND ..."
    add_overrides(parser, "where and how to run it; `python -m hpctrain --help cluster` lists keys")
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: one run per value of args.NAME=A,B")
    parser.add_argument("--cfg", action="store_true", help="print the configuration, and launch nothing")
    return parse_words(parser, words, command)


def parse_words(
    parser: argparse.ArgumentParser, words: Sequence[str], command: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the words before `--`; one that isn't an override, and a missing command, end the process with one line.

    Args:
        parser: of the command.
        words: that precede `--`, or all of them.
        command: the words after `--`; None without `--`.
    """
    options, unknown = parser.parse_known_intermixed_args(words)
    strays = [word for word in options.overrides if "=" not in word and not word.startswith("~")]
    # a stray word after an unknown option is that option's value; an option after it is the program's
    if unknown and words.index(unknown[0]) < min(map(words.index, strays), default=len(words)):
        parser.error(_about_unknown(unknown[0]))
    if strays:
        parser.error(_about_stray(parser.prog, words, strays[0], command))
    if not command:
        missing = "nothing follows --" if command is not None else "there is no -- with a command after it"
        parser.error(f"{missing}; write {parser.prog} [KEY=VALUE ...] -- COMMAND")
    return options


def _about_unknown(option: str) -> str:
    remedies = dict.fromkeys(("-m", "--multirun"), "a drill is of one run; type one command for each value")
    remedies["--code"] = "a new run copies the code as it is now; leave it out"
    remedy = remedies.get(option.partition("=")[0], "options of the program belong after --")
    return f"{option} is not an option here: {remedy}"


def _about_stray(prog: str, words: Sequence[str], stray: str, command: Sequence[str] | None) -> str:
    place = list(words).index(stray)
    if words[place - 1 : place] == ["--cfg"]:
        return f"--cfg has no value here; leave out {stray}"
    is_key = stray.partition(".")[0] in ProgramConfig.__dataclass_fields__ and Path(stray).suffix not in INTERPRETERS
    if is_key and not (command and command[0].startswith("-")):
        return f"{stray} has no value; write {stray}=VALUE"
    program = shlex.join([*words[place:], *(command or [])])
    before = "".join(f" {shlex.quote(word)}" for word in words[:place])
    return f"-- belongs before {stray}; write {prog}{before} -- {program}"
