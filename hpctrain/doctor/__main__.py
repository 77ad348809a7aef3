"""The program of the doctor's batch script: ``python -m hpctrain.doctor FOLDER``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain.cluster.slurm_step import needed_job_nodes
from hpctrain.cluster.variables import Variables
from hpctrain.config.resources import resources_of
from hpctrain.config.stored import load_run
from hpctrain.doctor.asked import Asked
from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.nodes import NO_PLUGIN, SCRIPT, NodeAnswers
from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import umask_of
from hpctrain.run.secret import discard_secret, write_secret
from hpctrain.supervise.step import COMPLAINT, NOT_OF_INTEREST, srun_environ, srun_options

NODES_S = 40.0
NODES_S_EACH = 0.5
"""Seconds for the shells of all nodes, and more for each node; one that hangs in a dead mount never answers."""
RANKS_S = 180.0
RANKS_S_EACH = 0.3
LONGEST_S = 600.0
"""Seconds for the ranks, more for each of them, and the most: many take minutes to import torch from a busy file
system, and the job has a time limit."""
PLUGIN = re.compile(r"mpi|pmi|plugin", re.IGNORECASE)
"""In srun's messages about an MPI plugin that it can't load."""
WITH_VALUES = ("-n", "-c", "-m", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--cpu-bind", "--distribution")
"""Options for srun that place tasks, and may have their value in the next word."""


class JobSteps:
    """Runs the steps of the job.

    Args:
        folder: of the examination.
        environ: the batch script's environment.
    """

    def __init__(self, folder: DoctorFolder, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = environ
        config = load_run(folder.request)
        self._plan = RunPlan(config, folder.as_run, resources_of(config))
        # what the image has doesn't matter to what is measured
        self._python = self._plan.slurm.node_python or sys.executable
        self._record = JobRecord(nodes=needed_job_nodes(Variables(environ)))

    def run(self) -> None:
        """Ask the nodes, then let ranks measure on those that work.

        Raises:
            OSError: the answers can't be stored.
        """
        os.umask(umask_of(self._plan.config.mode))
        self._ask_nodes()
        self._record.write(self._folder)
        nodes = tuple(node for node in self._record.nodes if self._record.answers[node].works)
        if nodes:
            self._record.stage, self._record.rank_nodes = "ranks", nodes
            self._record.write(self._folder)
            self._start_ranks(nodes)
        self._record.stage = "done"
        self._record.write(self._folder)

    def _ask_nodes(self) -> None:
        self._ask_once(())
        refused = self._record.complaints["nodes"]
        if any(answer.begun for answer in self._record.answers.values()) or not PLUGIN.search(" ".join(refused)):
            return
        # no shell began anywhere: perhaps srun can't load the plugin that it takes by default
        self._ask_once((NO_PLUGIN,))
        if any(answer.begun for answer in self._record.answers.values()):
            self._record.plugin_refused = "; ".join(refused)

    def _ask_once(self, more: Sequence[str]) -> None:
        plan, count = self._plan, len(self._record.nodes)
        command = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--export=ALL"]
        # one core: the rest of the request doesn't matter to a shell
        command += [
            "--cpus-per-task=1",
            "--wait=0",
            "--kill-on-bad-exit=0",
            *_without_tasks(plan.slurm.srun_args),
            *more,
        ]
        token = self._folder.token.read_text()
        directory = Asked.read(self._folder).directory
        command += ["sh", "-c", SCRIPT, "sh", str(self._folder.path), token, self._python, directory]
        answers = NodeAnswers(self._record.nodes, time.time())
        self._record.complaints["nodes"] = self._step(
            "nodes", command, NODES_S + NODES_S_EACH * count, lambda line: answers.read(line, time.time())
        )
        self._record.answers = answers.by_node

    def _start_ranks(self, nodes: Sequence[str]) -> None:
        write_secret(self._folder.path)
        named = nodes if len(nodes) < len(self._record.nodes) else ()
        command = [
            *srun_options(self._plan, named, num_nodes=len(nodes)),
            *([NO_PLUGIN] if self._record.plugin_refused else []),
            *(self._python, "-u", "-m", "hpctrain.doctor.ranks", str(self._folder.path)),
        ]
        try:
            self._record.complaints["ranks"] = self._step("ranks", command, self._ranks_s(len(nodes)), lambda _: None)
        finally:
            discard_secret(self._folder.path)

    def _ranks_s(self, num_nodes: int) -> float:
        return min(RANKS_S + RANKS_S_EACH * num_nodes * self._plan.resources.processes_per_node, LONGEST_S)

    def _step(self, name: str, command: Sequence[str], timeout_s: float, read: Callable[[str], None]) -> list[str]:
        """Run a step of srun; pass on the lines of its output, and return srun's own messages."""
        complaints: list[str] = []
        with subprocess.Popen(
            command,
            env=srun_environ(self._plan, self._environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            timer = threading.Timer(timeout_s, self._end_late, (name, process))
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                print(line.rstrip("\n"), flush=True)
                read(line)
                complaint = COMPLAINT.match(line)
                if complaint and not NOT_OF_INTEREST.search(line):
                    complaints.append(complaint["text"].strip())
            timer.cancel()
        return complaints

    def _end_late(self, name: str, process: subprocess.Popen[str]) -> None:
        self._record.late.append(name)
        process.send_signal(signal.SIGTERM)
        time.sleep(2)
        # a second signal makes srun leave tasks that don't end, in a mount that doesn't answer
        process.kill()


def _without_tasks(options: Sequence[str]) -> list[str]:
    """Options for srun that don't place tasks, of which the first step has one per node."""
    kept, words = [], list(options)
    while words:
        word = words.pop(0)
        if not word.startswith(("--ntasks", "-n", "-c", "--cpu", "--gpu", "--distribution", "-m")):
            kept.append(word)
        elif word in WITH_VALUES and words and not words[0].startswith("-"):
            words.pop(0)
    return kept


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the job; ``arguments`` are the folder alone."""
    # There is nothing to save. Not by the signal itself: the batch script would start this program again.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.FAILED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        JobSteps(DoctorFolder(Path(arguments[0])), environ).run()
    except (HpctrainError, OSError) as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
