"""A real SLURM of a few nodes on this machine."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import time
from dataclasses import replace

import accounting
import cgroups
import files
import impairment
import machine
import network
import requirements
from cgroups import Groups
from cluster import Cluster
from home import CONTROLLER, Home, Record
from impairment import Impairment
from machine import Machine
from options import GPUS_PER_NODE, Options
from problem import SandboxError
from version import unpacked

# Every slurmd reports that PMIx is missing, and a new controller that its state is: neither is ever the cause.
COMPLAINT = re.compile(r"\b(error|fatal):(?!.*(pmix|state file|NOTE:))", re.IGNORECASE)


class Sandbox:
    """The sandbox of one name, up or not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.home = Home(name)
        self.path = self.home.path
        self.cluster = Cluster(self.path)

    def up(self, options: Options) -> bool:
        """Bring the sandbox up, and wait until every node is idle. False where it was up already.

        Raises:
            SandboxError: It could not be brought up; nothing of it is left.
        """
        requirements.check(options)
        cgroups.detect(options)
        try:
            with self.home.locked():
                if self.is_up():
                    return False
                self._start_afresh(options)
        except BaseException:
            self.home.remove_unclaimed()
            raise
        return True

    def down(self) -> bool:
        """Take the sandbox down, and leave nothing behind. False where there was nothing."""
        requirements.check_root()
        if not self.path.exists():
            return False
        with self.home.locked():
            self._clear()
            self.home.remove()
        return True

    def is_up(self) -> bool:
        """Whether `up` has finished and the controller's machine runs."""
        record = self.home.record()
        return record is not None and record.ready and CONTROLLER in self.machines()

    def machines(self) -> dict[str, Machine]:
        """The nodes that are alive, and the controller, by name."""
        return machine.find(self.path)

    def record(self) -> Record:
        """The sandbox's record.

        Raises:
            SandboxError: It isn't up.
        """
        record = self.home.record()
        if record is None or not record.ready:
            name = "" if self.name == "default" else f" --name {self.name}"
            raise SandboxError(f"sandbox {self.name!r} isn't up. Type: python slurm/sandbox up{name}")
        return record

    def node(self, name: str) -> Machine:
        """A node that is alive.

        Raises:
            SandboxError: There is none of this name, or it is dead.
        """
        self._check_node(name)
        alive = self.machines()
        if name not in alive:
            raise SandboxError(f"{name} is dead. Type: python slurm/sandbox revive-node {name}")
        return alive[name]

    def kill_node(self, name: str) -> None:
        """Kill the node: first its network, since a dead machine closes no connection, then all of its processes."""
        self._check_node(name)
        with self.home.locked():
            node, controller = self.node(name), self._controller()
            network.cut(controller, name)
            node.kill()
            cgroups.remove(self.name, name)
            network.disconnect(controller, name)

    def revive_node(self, name: str) -> bool:
        """Start the node again, empty, and return it to service. False if it was alive."""
        self._check_node(name)
        with self.home.locked():
            if name in self.machines():
                return False
            self._start_nodes(self.record(), self._controller(), [name])
        self.cluster.return_to_service(name, timeout_s=60)
        return True

    def crash_controller(self, seconds: float) -> None:
        """Kill slurmctld, and start it again after ``seconds``."""
        controller = self._controller()
        controller.run("kill", "-KILL", (self.path / "slurmctld.pid").read_text().strip())
        time.sleep(seconds)
        controller.run("slurmctld")

    def cut(self, name: str) -> None:
        """Disconnect the node from all others; its processes live on."""
        self.node(name)
        network.cut(self._controller(), name)

    def slow(self, name: str, mbit: float) -> None:
        """Let the node's link carry only so many Mbit/s in each direction."""
        impairment.slow(self._controller(), self.node(name), mbit)

    def lossy(self, name: str, percent: float) -> None:
        """Let the node's link lose this share of its packets in each direction."""
        impairment.lose(self._controller(), self.node(name), percent)

    def impairments(self) -> dict[str, Impairment]:
        """What is wrong with the links of nodes, by name; nodes whose link is whole are left out."""
        return impairment.find(self._controller())

    def mend(self, name: str) -> list[str]:
        """Undo `cut`, `slow` and `lossy`, and return a node that was cut to service; returns which it was.

        That is `cut`, `impaired`, both or none.
        """
        node, controller = self.node(name), self._controller()
        cut, impaired = self.is_cut(name), name in self.impairments()
        if impaired:
            impairment.remove(controller, node)
        if cut:
            network.mend(controller, name)
            self.cluster.return_to_service(name, timeout_s=60)
        return [fault for fault, was in {"cut": cut, "impaired": impaired}.items() if was]

    def is_cut(self, name: str) -> bool:
        """Whether the node is alive and without a network."""
        self.node(name)
        return name not in network.connected(self._controller())

    def reset(self) -> bool:
        """Make every node alive, connected by a whole link and idle, without jobs. False if that is so already.

        Otherwise everything starts afresh, job ids too: that is quicker than to cancel jobs and to wait for their end.
        """
        self.record()
        with self.home.locked():
            options = self.record().options
            if self._is_as_new(options):
                return False
            self._start_afresh(options)
        return True

    def _is_as_new(self, options: Options) -> bool:
        alive = self.machines()
        names = set(options.node_names)
        if not names | {CONTROLLER} <= alive.keys() or not names <= network.connected(alive[CONTROLLER]):
            return False
        if impairment.find(alive[CONTROLLER]):
            return False
        try:
            return self.cluster.node_states() == dict.fromkeys(names, "idle") and not self.cluster.jobs()
        except SandboxError:  # the controller doesn't answer
            return False

    def _start_afresh(self, options: Options) -> None:
        try:
            self._clear()
            self._build(self.home.claim_network(options))
        except BaseException as error:
            lines = self._complaints()
            self._clear()
            self.home.remove()
            if isinstance(error, SandboxError):
                raise SandboxError("\n".join([str(error), *lines]), error.exit_code) from error
            raise

    def _build(self, record: Record) -> None:
        options = record.options
        self._write_files(record)
        controller = machine.start(self.path, [CONTROLLER], Groups(0))[CONTROLLER]
        network.connect_host(record, controller)
        self._start_munge(controller)
        if options.accounting:
            accounting.start(self.path, controller)
        controller.run("slurmctld")
        self._start_nodes(record, controller, options.node_names)
        self.cluster.wait_idle(options.node_names, timeout_s=60)
        self.home.write(replace(record, ready=True))

    def _write_files(self, record: Record) -> None:
        for directory in ("log", "munge", "spool", "state"):
            (self.path / directory).mkdir()
        (self.path / "hosts").write_text(files.hosts(record, socket.gethostname()))
        groups = cgroups.detect(record.options)
        (self.path / "slurm.conf").write_text(files.slurm_conf(self.path, record, groups))
        (self.path / "daemons.conf").write_text(files.daemons_conf(self.path, record, groups))
        (self.path / "gres.conf").write_text(files.gres_conf(self.path, record))
        (self.path / "cgroup.conf").write_text(files.cgroup_conf(self.path, groups))
        if record.options.switches:
            (self.path / "topology.conf").write_text(files.topology_conf(record))
        if record.options.gpu_form != "any":
            (self.path / "cli_filter.lua").write_text(files.cli_filter_lua(record.options.gpu_form))
        if record.options.oci:
            (self.path / "oci.conf").write_text(files.oci_conf(self.path))
        for index in range(GPUS_PER_NODE):
            os.mknod(self.path / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # each is a /dev/null

    def _start_munge(self, controller: Machine) -> None:
        home = self.path / "munge"
        (home / "key").touch(mode=0o600)
        (home / "key").write_bytes(secrets.token_bytes(64))
        paths = [f"--{kind}-file={home}/{kind}" for kind in ("key", "log", "pid", "seed")]
        controller.run("munged", *paths, f"--socket={home}/socket", "--num-threads=4")

    def _start_nodes(self, record: Record, controller: Machine, names: list[str]) -> None:
        # it would look for the program of a step where its own package installs it
        slurmd = ["slurmd"] if (folder := unpacked()) is None else ["slurmd", "-d", f"{folder}/bin/slurmstepd"]
        nodes = machine.start(self.path, names, cgroups.detect(record.options))
        for node in nodes.values():
            network.connect(record, controller, node)
        for name, process in {
            name: node.begin(*cgroups.enter(self.path), *slurmd) for name, node in nodes.items()
        }.items():
            output, _ = process.communicate()
            if process.returncode != 0:
                raise SandboxError(f"slurmd did not start on {name}: {output.strip()}")

    def _controller(self) -> Machine:
        self.record()
        if CONTROLLER not in (alive := self.machines()):
            raise SandboxError(f"the controller of sandbox {self.name!r} is dead. Type: python slurm/sandbox down")
        return alive[CONTROLLER]

    def _check_node(self, name: str) -> None:
        names = self.record().options.node_names
        if name not in names:
            raise SandboxError(f"no node {name!r}; this sandbox has {', '.join(names)}", exit_code=2)

    def _complaints(self) -> list[str]:
        """The last errors in each log."""
        found = []
        for log in sorted((self.path / "log").glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            found += [f"{log.name}: {line}" for line in lines if COMPLAINT.search(line)][-5:]
        return found

    def _clear(self) -> None:
        machine.kill_all(self.path)
        if record := self.home.record():
            network.disconnect_host(record)
        cgroups.remove(self.name)
        self.home.empty()
