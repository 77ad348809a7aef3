"""An examination: what is checked where the command is typed, then the job, then what its answers mean."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.plain_yaml import may_be_secret
from hpctrain.config.resources import check_gpu_request, resources_of
from hpctrain.config.root import Config
from hpctrain.config.stored import load, to_yaml
from hpctrain.doctor.finding import DoctorResult, Finding
from hpctrain.doctor.folder import (
    DoctorFolder,
    DoctorJobRecord,
    DoctorOptions,
    RankRecord,
    read_job,
    read_rank,
    write_record,
)
from hpctrain.doctor.folder_check import check_folder, disk_space_findings
from hpctrain.doctor.measurements import (
    RankAnswers,
    compare_with_baseline,
    figures,
    measured_lines,
    read_measured,
)
from hpctrain.doctor.nodes import failed_script, node_findings, unanswered_job, versions
from hpctrain.doctor.rank_findings import rank_findings
from hpctrain.doctor.site_file import (
    FOLDER,
    Change,
    gpu_changes,
    gpu_remarks,
    gpu_requests,
    site_changes,
    site_keys,
    site_name,
    site_text,
)
from hpctrain.doctor.slurm_findings import GPU_TYPE, SlurmView, view_slurm
from hpctrain.errors import ConfigError, RunDirectoryError, SchedulerError, SchedulerMissingError
from hpctrain.files import read_bytes, write_atomic, write_json
from hpctrain.launch.prepare import RunPlan, claim_default_path
from hpctrain.launch.sbatch import SubmitLimitError
from hpctrain.launch.submission import submit_doctor, would_be_accepted
from hpctrain.phrases import counted, listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.scheduler.job import JobState, SlurmJob, explain_held, explain_pending
from hpctrain.scheduler.slurm import Slurm

CHECKPOINTS = 2
"""Checkpoints that a run always keeps."""
LAST_BYTES = 2**20
"""Bytes at the end of a log that are searched for its last lines."""
TIME_LIMIT_MIN = 15
"""Time limit of the job: a short one starts sooner, and the checks take less than three minutes."""
POLL_S = 0.2
ASK_EVERY_S = 2.0
"""Seconds between two queries to SLURM at the beginning; they become rarer while the job is in the queue."""
ASK_SELDOM_S = 15.0
LATE_S = 20.0
"""Seconds that the job's last record may take to cross a shared file system."""
NEVER = re.compile(
    r"BadConstraints|PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|ReservationDeleted|Invalid(Account|QOS)"
    r"|(Account|QOS)NotAllowed|MaxMemPerLimit|DependencyNeverSatisfied"
)
"""Reasons for which a job waits that no time changes."""


class Examination:
    """Examines this machine, and the nodes of a request.

    Args:
        config: of the run that is to work.
        report: gets lines on the progress.
        options: the words and flags of the command.
        slurm: answers about settings and jobs.
    """

    def __init__(
        self, config: Config, report: Callable[[str], None], *, options: DoctorOptions, slurm: Slurm | None = None
    ) -> None:
        self._config = config
        self._report = report
        self._slurm = slurm or Slurm()
        self._options = options
        self._view: SlurmView | None = None
        self._gpu_changes: list[Change] = []
        self._versions = versions()
        self.result = DoctorResult()

    def check_login_node(self) -> None:
        """Check this machine and SLURM's settings."""
        self._report(
            "this machine: " + ", ".join(f"{name} {text or 'missing'}" for name, text in self._versions.items())
        )
        self.result.facts |= self._versions
        if _node_python(self._config) is None and not self._versions["torch"]:
            problem = f"torch isn't installed in {sys.prefix}"
            finding = Finding(check="versions", problem=problem, why="ranks need it", remedy="pip install torch")
            self.result.findings.append(finding)
        self.check_slurm()
        run_dir = self._config.run_dir
        home = Path("runs").absolute() if run_dir is None else Path(run_dir).absolute().parent
        # a mount that doesn't answer hangs here: then the line before names the place
        self._report(f"trying the file system of {home}")
        text, findings = check_folder(home)
        self.result.findings += findings
        self._report(text)

    def check_slurm(self) -> None:
        """Check SLURM's settings."""
        view, findings = view_slurm(self._config, self._slurm)
        self.result.findings += findings
        if view is not None:
            self._view = view
            self.result.facts |= view.facts
            self._report(view.text)

    def submit(self) -> DoctorFolder | None:
        """Make the folder of the examination, and submit its job; return the folder, or None if SLURM refuses the job.

        Raises:
            RunDirectoryError: the folder isn't empty, or can't be written.
            HpctrainError: nothing was submitted.
        """
        config = self._config = self._with_accepted_gpus(self._config)
        if config.run_dir is not None and Path(config.run_dir).is_dir() and any(Path(config.run_dir).iterdir()):
            raise RunDirectoryError(f"run_dir={config.run_dir}: the folder isn't empty; name a new one for the doctor")
        folder = DoctorFolder(Path(config.run_dir or claim_default_path("doctor")).absolute())
        stored = dataclasses.replace(config, name="doctor", run_dir=str(folder.path))
        folder.as_run.create_for_sweep(config.mode)
        with folder.as_run.permissions():
            for place in (folder.nodes, folder.ranks):
                place.mkdir(exist_ok=True)
            write_atomic(folder.request, to_yaml(stored))
            write_atomic(folder.token, secrets.token_hex(8))
            write_record(folder.options, self._options)
        limited = dataclasses.replace(stored, cluster=_short_job(config.cluster))
        try:
            job_id = submit_doctor(RunPlan(limited, folder.as_run, resources_of(limited)))
        except SubmitLimitError:
            raise  # it passes: not a fault of the request
        except ConfigError as error:
            shutil.rmtree(folder.path, ignore_errors=True)  # the same command may be typed again
            why = "a run with the same request would be refused, too"
            # sbatch's own refusals are about cluster=slurm, which is no help
            problem = error.problem if error.key == "cluster" else f"{error.key}={error.value}: {error.problem}"
            self.result.findings.append(Finding(check="job", problem=problem, why=why, remedy=error.remedy))
            return None
        self.result.add_job(folder.path, job_id)
        self._report(f"submitted job {job_id} for {counted(config.nodes, 'node')}")
        self._report(f"folder {folder.path}")
        return folder

    def _with_accepted_gpus(self, config: Config) -> Config:
        """Request GPUs by a type and in a form that sbatch accepts, if it doesn't accept what was typed."""
        cluster = config.cluster
        assert isinstance(cluster, SlurmCluster)
        if not cluster.node_gpus or cluster.gpus.is_in_gres:
            return config
        types = () if self._view is None else self._view.partition_gpus.types
        for candidate in gpu_requests(cluster, types):
            changed = dataclasses.replace(config, cluster=candidate)
            try:
                check_gpu_request(changed)
            except ConfigError:
                continue  # this form can't express it
            limited = dataclasses.replace(changed, cluster=_short_job(candidate))
            if would_be_accepted(RunPlan(limited, RunDirectory.at(Path.cwd()), resources_of(limited))):
                self._gpu_changes = gpu_changes(cluster, candidate)
                for change in self._gpu_changes:
                    self._report(f"cluster.{change.key}={change.value}: {change.reason}")
                if candidate.gpu_type is not None:
                    # it asked for the type that is now chosen
                    findings = [finding for finding in self.result.findings if finding.check != GPU_TYPE]
                    self.result.findings = findings
                return changed
        return config

    def read_job(self, folder: DoctorFolder) -> None:
        """Wait for the job, and find out what its answers mean.

        Raises:
            OSError: the result can't be stored.
        """
        result = self.result
        config = load(folder.request)
        job_id = result.job_id or _job_id(folder)
        result.add_job(folder.path, job_id)
        try:
            job, state = wait_for_job(folder, job_id, self._slurm, self._report)
        except JobNeverStartsError as error:
            self._slurm.cancel(job_id)
            finding = Finding(
                check="job",
                problem=f"the job will never start: {error}",
                why="a run with the same request wouldn't either",
                remedy="change what it names; the job was cancelled",
            )
            result.findings.append(finding)
            return
        if job is None or job.stage != "done":
            stage = None if job is None else job.stage
            result.findings.append(self._unanswered(folder, job_id, state, stage))
            return
        python = _node_python(config)
        expected = self._versions if python is None else self._expected_versions(job)
        result.findings += node_findings(job, folder=folder.path, python=python or sys.executable, versions=expected)
        answers = _rank_answers(folder, job, config)
        if job.rank_nodes:
            result.findings += rank_findings(answers)
        result.measured = dict(answers.measured)
        result.figures = figures(answers)
        for line in measured_lines(answers, result.figures):
            self._report(line)
        if size := answers.measured.get("checkpoint_bytes"):
            purpose = f"for {CHECKPOINTS} checkpoints of this model"
            result.findings += disk_space_findings(folder.path, CHECKPOINTS * int(size), purpose)
        if answers.measured:
            explained = any(finding.check == "network" for finding in result.findings)
            result.findings += compare_with_baseline(
                folder.baseline, answers.request, result.figures, renew=self._options.renew, explained=explained
            )
            result.site_file = self._write_site_file(folder, answers)

    def _unanswered(self, folder: DoctorFolder, job_id: str, state: str, stage: str | None) -> Finding:
        """The finding on a job that left no record (no stage), or not all answers.

        If it left no record although it began, its batch script may have failed.
        """
        if stage is None:
            host = self._slurm.batch_host(job_id)
            if host is not None and state == JobState.FAILED:
                logs = sorted(folder.as_run.logs.glob("batch_*.log"))
                lines = [line for log in logs for line in _lines(log)] if logs else None
                return failed_script(host, folder.as_run.logs, lines, sys.executable)
            stage = "" if host is None else "nodes"
        return unanswered_job(state, stage)

    def store(self) -> None:
        """Store the result beside the job's answers, if there is room for it."""
        if self.result.folder is not None:
            with contextlib.suppress(OSError):
                write_json(DoctorFolder(self.result.folder).findings, self.result.as_record())

    def _expected_versions(self, job: DoctorJobRecord) -> dict[str, str]:
        """The versions that all nodes should have where ranks have another Python: the first node's."""
        first = next((answer.versions for answer in job.answers.values() if answer.versions), {})
        return {**first, "hpctrain": self._versions["hpctrain"]}

    def _write_site_file(self, folder: DoctorFolder, answers: RankAnswers) -> Path | None:
        if any(record.stage != "done" for record in answers.records.values()) or self._options.has_site:
            return None
        if folder.request.stat().st_uid != os.geteuid():
            # its keys, such as cluster.setup, would run in all jobs of this user
            self._report(
                f"{folder.path} belongs to another user, so no site file is written; to get one, type the "
                "examination's command yourself"
            )
            return None
        # of the request as typed: the job had a shorter time limit
        cluster = self._config.cluster
        assert isinstance(cluster, SlurmCluster)
        path = FOLDER / f"{self._options.site or site_name(self.result.facts.get('cluster', ''))}.yaml"
        if path.exists():
            self._report(f"{path} is there already, and stays as it is; --site NAME writes another one")
            return None
        view = self._view
        changes = site_changes(cluster, None if view is None else view.partition, answers.job) + self._gpu_changes
        # values that may be secret stand below, and only once
        words = [word for word in self._options.typed if not may_be_secret(word.partition("=")[0])]
        keys = site_keys(cluster, changes)
        path.parent.mkdir(parents=True, exist_ok=True)
        remarks = [] if view is None else gpu_remarks(cluster, view.partition_gpus.descriptions)
        text = site_text(keys, shlex.join(["python", "-m", "hpctrain", *words]), changes, remarks)
        write_atomic(path, text, mode=0o600 if any(may_be_secret(f"cluster.{key}") for key in keys) else 0o666)
        return path


def _short_job(cluster: object) -> SlurmCluster:
    """The request of a short job that isn't requeued: its command would wait for it a second time."""
    assert isinstance(cluster, SlurmCluster)
    limit = min(TIME_LIMIT_MIN, cluster.time_limit_min)
    options = {name: value for name, value in cluster.sbatch.items() if name not in {"no_requeue", "no-requeue"}}
    sbatch = {**options, "requeue": False}
    return dataclasses.replace(cluster, time_limit_min=limit, signal_delay_s=0, sbatch=sbatch)


def _node_python(config: Config) -> str | None:
    """The ranks' Python, if it isn't that of the command."""
    return config.cluster.node_python if isinstance(config.cluster, SlurmCluster) else None


def _job_id(folder: DoctorFolder) -> str:
    """The job of an earlier command."""
    jobs = [record for record in JobRecords(folder.as_run).read() if record.get("job_id")]
    if not jobs:
        raise RunDirectoryError(f"{folder.path}: no job was submitted for this examination; type its command again")
    return str(jobs[-1]["job_id"])


def _rank_answers(folder: DoctorFolder, job: DoctorJobRecord, config: Config) -> RankAnswers:
    processes_per_node, cluster = resources_of(config).processes_per_node, config.cluster
    world_size = len(job.rank_nodes) * processes_per_node
    records = wait_for_records(folder, world_size)
    lines = (_last_line(folder, rank) for rank in range(world_size) if rank not in records)
    return RankAnswers(
        job=job,
        records=records,
        measured=read_measured(folder),
        processes_per_node=processes_per_node,
        gpus_per_node=cluster.node_gpus or 0,
        interface=cluster.network_interface,
        partition=cluster.partition if isinstance(cluster, SlurmCluster) else None,
        last_line=next(filter(None, lines), ""),
    )


def _last_line(folder: DoctorFolder, rank: int) -> str:
    try:
        return next(reversed(_lines(folder.as_run.rank_log(rank))), "")
    except OSError:
        return ""


def _lines(log: Path) -> list[str]:
    text = read_bytes(log, last_bytes=LAST_BYTES).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


class JobNeverStartsError(SchedulerError):
    """The job waits for something that no time changes; the message explains what."""


def wait_for_job(
    folder: DoctorFolder, job_id: str, slurm: Slurm, report: Callable[[str], None]
) -> tuple[DoctorJobRecord | None, str]:
    """Wait until the job is over; report why it waits, and what it does.

    Args:
        folder: of the examination.
        job_id: of its job.
        slurm: is asked for the job.
        report: gets a line for each change.

    Returns:
        The job's record, None without one; and the state in which it ended by SLURM's record, empty if SLURM has none.

    Raises:
        JobNeverStartsError: it will never start.
    """
    messages: set[str] = set()

    def report_once(text: str) -> None:
        if text and text not in messages:
            messages.add(text)
            report(text)

    ask_at, every_s, over_at, state = 0.0, ASK_EVERY_S, None, ""
    while True:
        _refresh_listing(folder.path)
        record = read_job(folder)
        if record is not None and record.stage == "done":
            return record, state
        if record is not None and record.stage == "ranks":
            report_once(f"ranks measure on {listed(record.rank_nodes, separator=' ')}")
        now = time.monotonic()
        if over_at is not None and now - over_at > LATE_S:
            return record, state
        if now >= ask_at:
            ask_at, every_s = now + every_s, min(every_s * 1.2, ASK_SELDOM_S)
            answered, job = _ask(slurm, job_id, report_once)
            report_once(_describe_wait(job, job_id))
            if job is not None and job.state.is_pending and NEVER.match(job.reason):
                raise JobNeverStartsError(explain_pending(job.reason))
            # SLURM forgets a job that ended a while ago
            if answered and over_at is None and (job is None or job.state.is_finished):
                over_at, state = now, "" if job is None else job.state.value
        time.sleep(POLL_S)


def wait_for_records(folder: DoctorFolder, world_size: int, *, late_s: float = LATE_S) -> dict[int, RankRecord]:
    """Read the records of ranks, once the job is over; on a shared file system they may come after the job's own.

    Args:
        folder: of the examination.
        world_size: number of ranks that were started.
        late_s: seconds to wait for those that are missing, or say that their rank hasn't ended.

    Returns:
        The records by rank, without ranks that left none.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    deadline = time.monotonic() + late_s
    while True:
        for place in (folder.path, folder.ranks):
            _refresh_listing(place)
        records = {rank: record for rank in range(world_size) if (record := read_rank(folder, rank))}
        ended = sum(record.has_ended for record in records.values())
        if ended == world_size or time.monotonic() > deadline:
            return records
        time.sleep(POLL_S)


def _refresh_listing(folder: Path) -> None:
    """Have NFS look for new files, which it does when a folder is listed."""
    with contextlib.suppress(OSError):
        os.listdir(folder)  # noqa: PTH208 - for its effect


def _ask(slurm: Slurm, job_id: str, report_once: Callable[[str], None]) -> tuple[bool, SlurmJob | None]:
    """Whether SLURM answered, and its record of the job."""
    try:
        return True, slurm.find([job_id])[job_id]
    except SchedulerMissingError as error:
        report_once(f"SLURM doesn't answer: {error}")
        return False, None


def _describe_wait(job: SlurmJob | None, job_id: str) -> str:
    if job is None or not job.state.is_pending:
        return ""
    return f"job {job_id} is queued: {explain_held(job) or explain_pending(job.reason)}"
