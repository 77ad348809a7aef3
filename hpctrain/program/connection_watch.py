"""Warn if the ranks of a program that uses torch don't connect to each other: each may be training its own model."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import psutil

from hpctrain.config.command import RankLauncher
from hpctrain.config.resources import resources_of
from hpctrain.program.processes import Process, read_proc, read_proc_link
from hpctrain.program.rank import ProgramRank
from hpctrain.run.start_record import UnconnectedRanks

CHECK_EVERY_S = 5.0
"""Seconds between two looks at the connections; the kernel lists a closed one for another 60 s."""
CONNECT_S = 60.0
"""Seconds after torch is loaded, which can itself take minutes, within which the ranks are expected to connect."""
LOWEST_EPHEMERAL_PORT = 32_768
"""gloo and NCCL listen on ports that the kernel chooses; proxies, databases and MLflow have lower ones."""
_TORCH = re.compile(r"/libtorch(_cpu|_python)?\.so")
_MPI = re.compile(r"/libmpi[\w-]*\.so")
"""Processes that MPI connects may have no TCP connection."""
_LIGHTNING = re.compile(r"^\s*(?:from|import)\s+(?:pytorch_)?lightning\b", re.MULTILINE)
_IN_USE = (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED, psutil.CONN_SYN_SENT)
_IPV4_IN_IPV6 = "::ffff:"

log = logging.getLogger("hpctrain.program")


class ConnectionWatch:
    """Watches, on rank zero, whether another rank connects to its program, and warns once if none does.

    It only warns: a connection may come later, and independent ranks need none.

    Args:
        rank: any rank; only rank zero of several is watched.
        root: the first process of its program.
    """

    def __init__(self, rank: ProgramRank, root: Process) -> None:
        self._rank = rank
        self._root = root
        self._is_over = rank.environment.world_size == 1 or not rank.is_rank_zero or rank.config.run.independent_ranks
        self._check_at = float("-inf")
        self._torch_since: float | None = None
        self._warned = False

    def check(self, now: float) -> None:
        """Look for a connection if it is time to; call it about once a second.

        Args:
            now: seconds on a monotonic clock.
        """
        if self._is_over or now < self._check_at:
            return
        self._check_at = now + CHECK_EVERY_S
        processes = [self._root, *self._root.descendants()]
        libraries = {process: read_proc(process.pid, "maps") for process in processes}
        with_torch = [process for process in processes if _TORCH.search(libraries[process])]
        if not with_torch:
            return
        port = self._rank.environment.master_port
        if any(map(_MPI.search, libraries.values())) or _has_connected(processes, port):
            self._end()
            return
        if self._torch_since is None:
            self._torch_since = now
        if not self._warned and now - self._torch_since >= CONNECT_S:
            self._warned = True
            self._warn(with_torch)

    def _end(self) -> None:
        self._is_over = True
        if self._warned:
            UnconnectedRanks.withdraw(self._rank.claim_folder)
            log.info("rank 0 has a connection now: the warning that the ranks haven't connected is withdrawn")

    def _warn(self, processes: Iterable[Process]) -> None:
        place, resources = self._rank.environment, resources_of(self._rank.config)
        launchers = [] if self._rank.spawns else [RankLauncher.of(process.words) for process in processes]
        launcher = next((rank_launcher.name for rank_launcher in launchers if rank_launcher is not None), "")
        framework = launcher or ("Lightning" if any(map(_uses_lightning, processes)) else "")
        unit = "node" if self._rank.spawns else "rank"
        record = UnconnectedRanks(count=place.world_size, unit=unit, framework=framework)
        remedy = "call torch.distributed.init_process_group(), or the function of your framework that calls it"
        if launcher:
            remedy = "write run.processes=node before --, so that it starts once per node"
        elif framework:
            devices = resources.spawned_per_node or resources.processes_per_node
            remedy = f'pass devices={devices}, num_nodes={resources.num_nodes}, strategy="ddp" to Lightning\'s Trainer'
        log.warning(
            "%s: %.0f s after rank 0 loaded torch, nothing has connected to it, at %s:%d (MASTER_ADDR, MASTER_PORT) or "
            "elsewhere; %s; if the ranks are meant to work independently, set run.independent_ranks=true",
            *(record.text, CONNECT_S, place.master_addr, place.master_port, remedy),
        )
        with contextlib.suppress(OSError):  # the log has the warning
            record.write(self._rank.claim_folder)


def _has_connected(processes: Iterable[Process], port: int) -> bool:
    """Whether a program listens or is connected at a port, or has a connection that may lead to another rank.

    Also true if that can't be read, for example if the program has a network namespace of its own, which psutil skips.
    """
    pids = {process.pid for process in processes}
    if len({read_proc_link(pid, "ns/net") for pid in (os.getpid(), *pids)} - {""}) > 1:
        return True
    try:
        sockets = psutil.net_connections("tcp")
    except (OSError, psutil.Error) as error:
        log.debug("the program's connections can't be read: %s", error)
        return True
    of_program = [socket for socket in sockets if socket.pid in pids]
    # for 60 s, the kernel lists connections that have ended, without a process
    ended = [socket for socket in sockets if socket.pid is None and socket.status not in _IN_USE]
    if any(
        port in (_end_of(socket.laddr)[1], _end_of(socket.raddr)[1]) and socket.status != psutil.CONN_SYN_SENT
        for socket in (*of_program, *ended)
    ):
        return True
    listening = {socket.laddr.port for socket in of_program if socket.status == psutil.CONN_LISTEN}
    ends = {(_end_of(socket.laddr), _end_of(socket.raddr)): socket.status for socket in of_program}
    outside = [
        (local, remote)
        for (local, remote), status in ends.items()
        if status == psutil.CONN_ESTABLISHED and (remote, local) not in ends
    ]
    return any(local[1] in listening or min(local[1], remote[1]) >= LOWEST_EPHEMERAL_PORT for local, remote in outside)


def _end_of(address: Any) -> tuple[str, int]:
    """Return host and port of one end of a connection; an empty host if it isn't connected."""
    host, port = address or ("", 0)
    return host.removeprefix(_IPV4_IN_IPV6), port


def _uses_lightning(process: Process) -> bool:
    """Whether the script of a process itself imports Lightning."""
    words = process.words
    modules = [f"{after.replace('.', '/')}.py" for word, after in pairwise(words) if word == "-m"]
    scripts = [word for word in words if word.endswith(".py")]
    return any(_LIGHTNING.search(read_proc(process.pid, "cwd", script)) for script in (*scripts, *modules))
