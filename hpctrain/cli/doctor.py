"""Find out what would fail or slow a run on this machine or cluster, before the first one.

examples:
  python -m hpctrain doctor                                     # this machine, and SLURM's settings
  python -m hpctrain doctor cluster=slurm nodes=4               # also four nodes, through a job
  python -m hpctrain doctor cluster=slurm nodes=4 cluster.gpus_per_node=4 cluster.partition=gpu
  python -m hpctrain doctor runs/doctor/2026-01-31_12-00-00     # wait for its job again, or read its answers

The job has the request of the run that you describe, and a time limit of 15 minutes. It checks on each node that the
folder is shared and the Python is there, compares the clocks, and then measures the network between all pairs of
nodes, the collectives, the devices and the disk. Its answers stay in runs/doctor/DATE_TIME, or in run_dir.

If ranks worked, conf/cluster/NAME.yaml gets the keys with which they did, unless the file is there already: from then
on, `cluster=NAME` is enough. The first measurements are the baseline, in runs/doctor/baseline.json, with which later
ones are compared.

Exit code 0 if no error was found; 1 if something would fail a run; 2 for overrides that can't work, or a job that SLURM
refuses; 4 after Ctrl-C: the job continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.cli.arguments import add_overrides, command_parser
from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer
from hpctrain.config.stored import load
from hpctrain.doctor.examination import Examination
from hpctrain.doctor.finding import DoctorResult, Severity
from hpctrain.doctor.folder import DoctorFolder, DoctorOptions, is_name, read_options
from hpctrain.errors import ConfigError, ExitCode
from hpctrain.launch.sbatch import require_sbatch
from hpctrain.phrases import all_of, counted

WIDTH = 100


def main(arguments: list[str]) -> int:
    """Examine; ``arguments`` are those after `doctor`."""
    parser = command_parser("doctor", __doc__)
    add_overrides(parser, "the run that is to work, such as cluster=slurm nodes=4; or the folder of an examination")
    parser.add_argument("--site", metavar="NAME", help="name of the site file (default: the cluster's name)")
    parser.add_argument("--new-baseline", action="store_true", help="replace the baseline by today's figures")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    options = parser.parse_intermixed_args(arguments)
    if options.site is not None and not is_name(options.site):
        parser.error(f"--site {options.site}: expected a letter, then letters, digits and _; not slurm or local")
    earlier = [word for word in options.overrides if "=" not in word and not word.startswith("~")]
    progress = sys.stderr if options.json else sys.stdout

    def report(text: str) -> None:
        # a name and a path stay on one line, however long it is
        lines = _wrapped("", text) if len(text.split()) > 2 else [text]
        print(*lines, sep="\n", file=progress, flush=True)

    if earlier:
        folder = DoctorFolder(Path(earlier[0]).absolute())
        if len(options.overrides) > 1 or not folder.request.is_file():
            parser.error(f"{earlier[0]} is neither KEY=VALUE nor the folder of an examination")
        # those of the first command belong to its own day
        doctor_options = dataclasses.replace(read_options(folder), renew=options.new_baseline)
        examination = Examination(load(folder.request), report, options=doctor_options)
        examination.check_slurm()
        return _examine_nodes(examination, folder, options)
    composer = Composer(options.config_dir)
    composer.can_sweep = False
    config = composer.compose(options.overrides)
    if config.cluster.dry_run:
        raise ConfigError("cluster.dry_run", True, "the doctor submits a real job", "leave it out")
    doctor_options = DoctorOptions(
        typed=["doctor", *arguments], directory=str(Path.cwd()), site=options.site, renew=options.new_baseline
    )
    examination = Examination(config, report, options=doctor_options)
    examination.check_login_node()
    if not isinstance(config.cluster, Slurm):
        return _end(examination.result, options)
    if examination.result.would_fail:
        report("no job is submitted before that is mended")
        return _end(examination.result, options)
    require_sbatch()
    return _examine_nodes(examination, None, options)


def _examine_nodes(examination: Examination, folder: DoctorFolder | None, options: argparse.Namespace) -> int:
    """Submit the job, unless it has a folder already, and read its answers."""
    try:
        folder = folder or examination.submit()
        if folder is None:
            _end(examination.result, options)
            return ExitCode.BAD_CONFIGURATION
        examination.read_job(folder)
    except KeyboardInterrupt:
        result = examination.result
        if result.job_id is not None and result.folder is not None:
            name = DoctorFolder(result.folder).as_run.as_typed
            print(
                f"\nthe job continues; to see what it finds: python -m hpctrain doctor {name}; "
                f"to cancel it: scancel {result.job_id}",
                file=sys.stderr,
            )
        return ExitCode.INTERRUPTED
    examination.store()
    return _end(examination.result, options)


def _end(result: DoctorResult, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(result.as_record()))
    else:
        print("\n".join(_text(result)))
    return ExitCode.FAILED if result.would_fail else ExitCode.FINISHED


def _text(result: DoctorResult) -> Iterator[str]:
    for finding in result.ordered:
        yield ""
        yield from _wrapped(f"{finding.severity}: ", finding.problem)
        yield from _wrapped("  why: ", finding.why)
        yield from _wrapped("  do:  ", finding.remedy)
    yield ""
    severities = [finding.severity for finding in result.findings]
    counts = [counted(count, severity) for severity in Severity if (count := severities.count(severity))]
    if result.would_fail:
        yield f"{all_of(counts)}: a run would fail"
    else:
        yield all_of(counts) if counts else "no fault was found"
    if result.site_file is not None:
        option = f"cluster={result.site_file.stem}"
        yield f"wrote {result.site_file}: from now on, python -m hpctrain {option} nodes=N"
        yield f"to prove that interruptions change nothing here: python -m hpctrain drill {option} nodes=2"
    if result.job_id is None and "SLURM" in result.facts and not result.would_fail:
        yield "to check the nodes as well: python -m hpctrain doctor cluster=slurm nodes=2"


def _wrapped(label: str, text: str) -> Sequence[str]:
    # names of folders and commands stay whole, so that they can be copied
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * (7 if label else 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
