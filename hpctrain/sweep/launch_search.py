"""Launch the runs that a sweep's command found; the tasks of a search ask for theirs."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hpctrain.config.cluster import Slurm
from hpctrain.errors import ConfigError, ExitCode
from hpctrain.launch.launcher import print_plan
from hpctrain.launch.prepare import RunPlan, plan
from hpctrain.launch.sbatch import largest_array, require_sbatch, task_arrays
from hpctrain.launch.submission import script, submit_search
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launch_mark import LaunchMark
from hpctrain.search.record import SweepRecord
from hpctrain.sweep.found_runs import SEARCH_KINDS, FoundRuns
from hpctrain.sweep.runs import SweepRun, place
from hpctrain.sweep.sweep import Sweep
from hpctrain.sweep.worker import work_here


def refuse_other_sweep(home: RunDirectory, record: SweepRecord) -> None:
    """Refuse a command in the folder of another sweep, whose runs it would mix with its own.

    Raises:
        ConfigError: the folder has a search, or draws of another space or seed.
    """
    there = SweepRecord.read(home)
    if there is None or there.kind == record.kind == "grid":
        return
    same = (there.kind, there.space, there.seed) == (record.kind, record.space, record.seed)
    is_unfinished = bool(LaunchMark(home).describe_unfinished())
    if same and (there.kind == "random" or is_unfinished) and not there.earlier:
        return
    problem = f"already has a sweep={there.kind}{'' if same else _difference(there, record)}"
    resume = f"python -m hpctrain resume {home.as_typed}"
    remedy = f"choose another run_dir, or continue the one there: {resume}, with sweep.num_runs=N for more runs"
    if there.kind == "grid":
        remedy = f"choose another run_dir, or continue the one there: {resume}"
    raise ConfigError("run_dir", str(home.path), problem, remedy)


def _difference(there: SweepRecord, record: SweepRecord) -> str:
    """How the sweep in a folder differs from that of a command; empty if its kind already shows it."""
    if there.kind != record.kind:
        return ""
    return f" with sweep.seed={there.seed}" if there.space == record.space else " of other values"


def launch_found(sweep: Sweep, found: FoundRuns) -> list[int]:
    """Place the runs in the sweep's folder, and launch them; return their exit codes, or those of the command."""
    if found.record.kind not in SEARCH_KINDS:
        return sweep.launch(place(found.runs, sweep.home))
    template = found.runs[0].config
    if template.cluster.dry_run:
        _print_dry_run(sweep.home, found)
        return [ExitCode.FINISHED]
    is_slurm = isinstance(template.cluster, Slurm)
    if is_slurm:
        require_sbatch()
    # all runs of asha are known; those of optuna get their folders when they are drawn
    known = place(found.runs, sweep.home) if found.record.kind == "asha" else []
    sweep.print_warnings(known or found.runs[:1])
    code = ExitCode.FINISHED
    with sweep.prepared(known, mode=template.mode) as plans:
        # for the runs that are made later: those of optuna, and those that a resume adds
        sweep.code.assign_to(sweep.home, template)
        if is_slurm:
            run = plans[0] if plans else _template(found.runs[0], sweep.home)
            code = submit_tasks(sweep.home, run, found.record.num_runs or 1)
    return [code] if is_slurm else [work_here(sweep.home)]


def submit_tasks(home: RunDirectory, run: RunPlan, num_tasks: int) -> ExitCode:
    """Submit tasks of a search, and print what to type next; FAILED if SLURM took only some of them.

    Args:
        home: the folder of the sweep.
        run: any run of the search, from which the request to SLURM is read.
        num_tasks: of the arrays.
    """
    job_ids = submit_search(run, home, num_tasks)
    for array, count in Counter(job_id.partition("_")[0] for job_id in job_ids).items():
        print(
            f"submitted job array {array} with {counted(count, 'task')}; each takes the next run of the search when it "
            "starts"
        )
    print(f"run directories {home.path}/0, {home.path}/1, ...")
    print(f"  python -m hpctrain status --runs-dir {home.as_typed}")
    print(f"  python -m hpctrain cancel {home.as_typed}", flush=True)
    return ExitCode.FINISHED if len(job_ids) == num_tasks else ExitCode.FAILED


def _print_dry_run(home: RunDirectory, found: FoundRuns) -> None:
    run, count = _template(found.runs[0], home), found.record.num_runs or 1
    if isinstance(run.config.cluster, Slurm):
        arrays = task_arrays([range(count)], run.slurm.max_parallel_runs, largest_array(count))
        for array in arrays:
            print(script(run, home, len(array.tasks), array.max_parallel))
        what = "array" if len(arrays) == 1 else f"{len(arrays)} arrays"
        print(f"# nothing was submitted; the {what} would train {counted(count, 'run')}")
    else:
        print_plan(run, f"the first of {counted(count, 'run')}")


def _template(run: SweepRun, home: RunDirectory) -> RunPlan:
    return plan(dataclasses.replace(run.config, run_dir=str(home.path / "0")))
