"""An examination: what is checked where the command is typed, then the job, then what its answers mean."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.config.secret_keys import may_be_secret
from hpctrain.config.stored import load
from hpctrain.doctor.asked import Asked
from hpctrain.doctor.baseline import compare_with_baseline, request_name
from hpctrain.doctor.cluster_view import view_cluster
from hpctrain.doctor.examined import Examined
from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.folder_check import FolderCheck, check_folder
from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.measurements import figures, measured_lines
from hpctrain.doctor.node_findings import batch_script_finding, job_finding, never_started_finding, node_findings
from hpctrain.doctor.rank_answers import RankAnswers, read_measured
from hpctrain.doctor.rank_findings import rank_findings
from hpctrain.doctor.room import room_findings
from hpctrain.doctor.site_file import FOLDER, site_changes, site_keys, site_name, site_text
from hpctrain.doctor.submission import submit_examination
from hpctrain.doctor.versions import versions
from hpctrain.doctor.wait import JobNeverStartsError, wait_for_job, wait_for_records
from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_bytes, write_atomic, write_json
from hpctrain.phrases import counted, scaled
from hpctrain.run.job_records import JobRecords
from hpctrain.scheduler.job import JobState
from hpctrain.scheduler.settings import Partition
from hpctrain.scheduler.slurm import Slurm

CHECKPOINTS = 2
"""Checkpoints that a run always keeps."""
LAST_BYTES = 2**20
"""Bytes at the end of a log that are searched for its last lines."""

Report = Callable[[str], None]


class Examination:
    """Examines this machine, and the nodes of a request.

    Args:
        config: of the run that is to work.
        report: gets lines on the progress.
        asked: the words and flags of the command.
        slurm: answers about settings and jobs.
    """

    def __init__(
        self,
        config: Config,
        report: Report,
        *,
        asked: Asked,
        slurm: Slurm | None = None,
    ) -> None:
        self._config = config
        self._report = report
        self._slurm = slurm or Slurm()
        self._asked = asked
        self._partition: Partition | None = None
        self._versions = versions()
        self.examined = Examined()

    def look_here(self) -> None:
        """Check this machine and SLURM's settings."""
        found = self.examined
        named = ", ".join(f"{name} {version or 'missing'}" for name, version in self._versions.items())
        self._report(f"this machine: {named}")
        found.facts |= self._versions
        cluster = self._config.cluster
        python = cluster.node_python if isinstance(cluster, SlurmCluster) else None
        if not self._versions["torch"] and python is None:
            found.findings.append(_no_torch())
        self.look_at_slurm()
        # a mount that doesn't answer hangs here: then the line before says where
        self._report(f"trying the file system of {self._home}")
        checked = check_folder(self._home)
        found.findings += checked.findings
        self._report(_folder_line(checked))

    def look_at_slurm(self) -> None:
        """Check SLURM's settings."""
        view = view_cluster(self._config, self._slurm)
        self._partition = view.partition
        self.examined.facts |= view.facts
        self.examined.findings += view.findings
        if view.text:
            self._report(view.text)

    @property
    def _home(self) -> Path:
        """The folder that will hold run directories."""
        given = self._config.run_dir
        return Path("runs").absolute() if given is None else Path(given).absolute().parent

    def submit(self) -> DoctorFolder:
        """Submit the job; return its folder.

        Raises:
            HpctrainError: nothing was submitted.
        """
        folder, job_id = submit_examination(self._config, self._asked)
        self.examined.folder, self.examined.job_id = folder.path, job_id
        wanted = counted(self._config.nodes, "node")
        self._report(f"submitted job {job_id} for {wanted}")
        self._report(f"folder {folder.path}")
        return folder

    def read_job(self, folder: DoctorFolder) -> None:
        """Wait for the job, and find out what its answers mean.

        Raises:
            OSError: the result can't be stored.
        """
        found = self.examined
        config = load(folder.request)
        found.folder = folder.path
        if found.job_id is None:
            jobs = [record for record in JobRecords(folder.as_run).read() if record.get("job_id")]
            if not jobs:
                raise RunDirectoryError(
                    f"{folder.path}: no job was submitted for this examination; type its command again"
                )
            found.job_id = str(jobs[-1]["job_id"])
        try:
            record, state = wait_for_job(folder, found.job_id, self._slurm, self._report)
        except JobNeverStartsError as error:
            self._slurm.cancel(found.job_id)
            found.findings.append(never_started_finding(str(error)))
            return
        if record is None:
            found.findings.append(self._without_answers(folder, found.job_id, state))
            return
        if record.stage != "done":
            found.findings.append(job_finding(state, record.stage))
            return
        python = None if not isinstance(config.cluster, SlurmCluster) else config.cluster.node_python
        found.findings += node_findings(
            record, str(folder.path), python or sys.executable, self._expected_versions(record, python)
        )
        answers = self._rank_answers(folder, record, config)
        found.findings += rank_findings(answers)
        found.measured = dict(answers.measured)
        found.figures = figures(answers)
        for line in measured_lines(answers, found.figures):
            self._report(line)
        self._check_room(folder, answers)
        if answers.measured:
            self._compare(folder, config, answers)
            self._write_site_file(folder, record, answers)

    def _without_answers(self, folder: DoctorFolder, job_id: str, state: str) -> Finding:
        host = self._slurm.batch_host(job_id)
        if host is None or state != JobState.FAILED:
            return job_finding(state, "" if host is None else "nodes")
        logs = sorted(folder.as_run.logs.glob("batch_*.log"))
        lines = [line for log in logs for line in _lines(log)] if logs else None
        return batch_script_finding(host, folder.as_run.logs, lines, sys.executable)

    def store(self) -> None:
        """Store the result beside the job's answers, if there is room for it."""
        if self.examined.folder is not None:
            with contextlib.suppress(OSError):
                write_json(DoctorFolder(self.examined.folder).findings, self.examined.as_record())

    def _expected_versions(self, record: JobRecord, python: str | None) -> dict[str, str]:
        """The versions that all nodes should have: this Python's, or the first node's if ranks have another one."""
        if python is None:
            return self._versions
        first = next((one.versions for one in record.answers.values() if one.versions), {})
        return {**first, "hpctrain": self._versions["hpctrain"]}

    def _rank_answers(self, folder: DoctorFolder, record: JobRecord, config: Config) -> RankAnswers:
        resources = resources_of(config)
        world = len(record.rank_nodes) * resources.processes_per_node
        records = wait_for_records(folder, world)
        silent = [rank for rank in range(world) if rank not in records]
        return RankAnswers(
            job=record,
            records=records,
            measured=read_measured(folder),
            processes_per_node=resources.processes_per_node,
            gpus_per_node=config.cluster.gpus_per_node or 0,
            interface=config.cluster.network_interface,
            last_lines={rank: line for rank in silent if (line := _last_line(folder, rank))},
        )

    def _check_room(self, folder: DoctorFolder, answers: RankAnswers) -> None:
        size = answers.measured.get("checkpoint_bytes")
        if size:
            purpose = f"for {CHECKPOINTS} checkpoints of this model"
            self.examined.findings += room_findings(folder.path, CHECKPOINTS * int(size), purpose)

    def _compare(self, folder: DoctorFolder, config: Config, answers: RankAnswers) -> None:
        cluster = config.cluster
        assert isinstance(cluster, SlurmCluster)
        request = request_name(
            cluster.partition or "", len(answers.job.rank_nodes), answers.processes_per_node, answers.gpus_per_node
        )
        self.examined.findings += compare_with_baseline(
            folder.baseline,
            request,
            self.examined.figures,
            renew=self._asked.renew,
            explained=any(one.check == "network" for one in self.examined.findings),
        )

    def _write_site_file(self, folder: DoctorFolder, record: JobRecord, answers: RankAnswers) -> None:
        if any(one.get("stage") != "done" for one in answers.records.values()) or self._asked.has_site:
            return
        if folder.request.stat().st_uid != os.geteuid():
            # its keys, such as cluster.setup, would run in all jobs of this user
            self._report(
                f"{folder.path} belongs to another user, so no site file is written; to get one, type the "
                "examination's command yourself"
            )
            return
        # of the request as typed: the job had a shorter time limit
        cluster = self._config.cluster
        assert isinstance(cluster, SlurmCluster)
        path = FOLDER / f"{self._asked.site or site_name(self.examined.facts.get('cluster', ''))}.yaml"
        if path.exists():
            self._report(f"{path} is there already, and stays as it is; --site NAME writes another one")
            return
        changes = site_changes(cluster, self._partition, record)
        # values that may be secret stand below, and only once
        words = [word for word in self._asked.typed if not may_be_secret(word.partition("=")[0])]
        keys = site_keys(cluster, changes)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = site_text(keys, shlex.join(["python", "-m", "hpctrain", *words]), changes)
        write_atomic(path, text, mode=0o600 if any(may_be_secret(f"cluster.{key}") for key in keys) else 0o666)
        self.examined.site_file = path


def _no_torch() -> Finding:
    return Finding(
        check="versions",
        severity=Severity.ERROR,
        problem=f"torch isn't installed in {sys.prefix}",
        why="ranks need it",
        remedy="pip install torch",
    )


def _folder_line(checked: FolderCheck) -> str:
    system = checked.system
    if system is None:
        return f"{checked.folder}: can't be looked at"
    works = f"; {', '.join(checked.works)} work" if checked.works else ""
    return f"{checked.folder}: {system.kind}, {scaled(system.free_bytes, 'B')} free{works}"


def _last_line(folder: DoctorFolder, rank: int) -> str:
    try:
        return next(reversed(_lines(folder.as_run.rank_log(rank))), "")
    except OSError:
        return ""


def _lines(log: Path) -> list[str]:
    text = read_bytes(log, last_bytes=LAST_BYTES).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
