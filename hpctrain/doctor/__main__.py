"""The program of the doctor's batch script: ``python -m hpctrain.doctor FOLDER``.

Two steps: shells on the nodes, which need neither Python nor the shared folder, and so can report that these are
missing; then ranks, started as a run's are, on the nodes that passed. Not ssh, which many sites forbid, and whose
environment isn't a job's; and not nccl-tests, which a user would have to build: ranks measure NCCL through torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster.slurm_step import needed_job_nodes
from hpctrain.cluster.variables import Variables
from hpctrain.config.resources import resources_of
from hpctrain.config.stored import load_run
from hpctrain.doctor.folder import DoctorFolder, DoctorJobRecord, NodeAnswer, read_options, write_record
from hpctrain.doctor.nodes import NO_PLUGIN, SCRIPT, read_line
from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import umask_of
from hpctrain.run.secret import discard_secret, write_secret
from hpctrain.supervise.ranks import COMPLAINT, NOT_OF_INTEREST, srun_environ, srun_options

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
        self._nodes = needed_job_nodes(Variables(environ))
        # complete at the end of each step
        self._record = DoctorJobRecord(nodes=self._nodes)

    def run(self) -> None:
        """Ask the nodes, then let ranks measure on those that work.

        Raises:
            OSError: the answers can't be stored.
        """
        os.umask(umask_of(self._plan.config.mode))
        plugin_refused = self._ask_nodes()
        record = replace(self._record, plugin_refused=plugin_refused)
        write_record(self._folder.job, record)
        nodes = tuple(node for node in self._nodes if record.answers[node].works)
        if nodes:
            record = replace(record, stage="ranks", rank_nodes=nodes)
            write_record(self._folder.job, record)
            self._start_ranks(nodes, [NO_PLUGIN] if plugin_refused else [])
        write_record(self._folder.job, replace(record, stage="done"))

    def _ask_nodes(self) -> str:
        """Ask each node; return why srun can't load its default MPI plugin, empty if it can."""
        if self._ask(()):
            return ""
        refused = self._record.complaints["nodes"]
        # no shell began anywhere: perhaps srun can't load the plugin that it takes by default
        return "; ".join(refused) if PLUGIN.search(" ".join(refused)) and self._ask((NO_PLUGIN,)) else ""

    def _ask(self, options: Sequence[str]) -> bool:
        """Run a shell on each node; return whether any began."""
        count = len(self._nodes)
        command = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--export=ALL"]
        # one core: the rest of the request doesn't matter to a shell
        command += ["--cpus-per-task=1", "--wait=0", "--kill-on-bad-exit=0"]
        command += [*_without_tasks(self._plan.slurm.srun_args), *options]
        directory = read_options(self._folder).directory
        token = self._folder.token.read_text()
        command += ["sh", "-c", SCRIPT, "sh", str(self._folder.path), token, self._python, directory]
        self._record.answers.update({node: NodeAnswer(node) for node in self._nodes})
        self._step("nodes", command, NODES_S + NODES_S_EACH * count)
        return any(answer.begun for answer in self._record.answers.values())

    def _start_ranks(self, nodes: Sequence[str], options: Sequence[str]) -> None:
        write_secret(self._folder.path)
        command = [
            *srun_options(self._plan, nodes if len(nodes) < len(self._nodes) else (), num_nodes=len(nodes)),
            *options,
            *(self._python, "-u", "-m", "hpctrain.doctor.rank", str(self._folder.path)),
        ]
        world_size = len(nodes) * self._plan.resources.processes_per_node
        try:
            self._step("ranks", command, min(RANKS_S + RANKS_S_EACH * world_size, LONGEST_S))
        finally:
            discard_secret(self._folder.path)

    def _step(self, name: str, command: Sequence[str], timeout_s: float) -> None:
        """Run a step of srun; pass on the lines of its output, and collect nodes' answers and srun's own messages."""
        self._record.complaints[name] = []
        begun_at = time.time()
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
                read_line(self._record.answers, line, begun_at, time.time())
                complaint = COMPLAINT.match(line)
                if complaint and not NOT_OF_INTEREST.search(line):
                    self._record.complaints[name].append(complaint["text"].strip())
            timer.cancel()

    def _end_late(self, name: str, process: subprocess.Popen[str]) -> None:
        self._record.late.append(name)
        process.send_signal(signal.SIGTERM)
        time.sleep(2)
        # a second signal makes srun leave tasks that don't end, in a mount that doesn't answer
        process.kill()


def _without_tasks(options: Sequence[str]) -> list[str]:
    """Options for srun that don't place tasks, of which the first step has one per node."""
    other_options, words = [], list(options)
    while words:
        word = words.pop(0)
        if not word.startswith(("--ntasks", "-n", "-c", "--cpu", "--gpu", "--distribution", "-m")):
            other_options.append(word)
        elif word in WITH_VALUES and words and not words[0].startswith("-"):
            words.pop(0)
    return other_options


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
