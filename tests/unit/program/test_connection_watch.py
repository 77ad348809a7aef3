"""Ranks of a program that uses torch and never connect to each other: real processes and real connections."""

import contextlib
import logging
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import ProgramConfig
from hpctrain.config.run import ProgramRun
from hpctrain.launch.local import rank_variables
from hpctrain.program.connection_watch import CONNECT_S, ConnectionWatch
from hpctrain.program.output import ProgramOutput
from hpctrain.program.processes import Process
from hpctrain.program.rank import ProgramRank
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.start_record import UnconnectedRanks

RANK = """
import mmap, os, socket, sys
def load(name):
    with open(name, "w+b") as file:
        file.write(b"x")
        file.flush()
        return mmap.mmap(file.fileno(), 1)
def serve(port=0):
    made = socket.create_server(("127.0.0.1", port))
    return made, made.getsockname()[1]
def call(port):
    return socket.create_connection(("127.0.0.1", port))
rest = []
for line in sys.stdin:
    rest.append(eval(line))
    print(rest[-1][1] if line.startswith("serve") else "", flush=True)
"""


@dataclass
class Rank:
    """A process that stands for the program of a rank; other ranks are this test's own process."""

    process: subprocess.Popen[str]
    watch: ConnectionWatch
    record: ProgramRank

    def do(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def record_after(self, *times):
        for now in times:
            self.watch.check(now)
        return UnconnectedRanks.read(self.record.claim_folder)


@pytest.fixture
def rank(directory, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "pytorch.py").touch()
    (tmp_path / "train.py").write_text(f"import lightning.pytorch as pl\n{RANK}")
    started = []

    def start(world_size=2, script=("-c", RANK), **run):
        process = subprocess.Popen(
            [sys.executable, "-S", *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        started.append(process)
        environment = ClusterEnvironment.from_environment(rank_variables(0, world_size, port))
        config = ProgramConfig(run=ProgramRun(command=["x"], **run))
        directory.attempt(1).mkdir(exist_ok=True)
        record = ProgramRank(
            config=config,
            claim=Claim(Ledger(directory), 1),
            environment=environment,
            session=tmp_path,
            output=ProgramOutput(),
        )
        made = Rank(process, ConnectionWatch(record, Process.of(process.pid)), record)
        made.do("load('libtorch_cpu.so')")
        return made

    start.port = port
    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_that_never_connect_are_warned_about_once_and_by_name(rank, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)
    caplog.set_level(logging.INFO)
    found = rank(world_size=4)
    # neither a connection between its own processes, nor one to a proxy or a database
    port = found.do("serve()")
    found.do(f"(call({port}), rest[-1][0].accept())")
    with socket.create_server(("127.0.0.1", _low_port())) as proxy:
        found.do(f"call({proxy.getsockname()[1]})")
        assert found.record_after(0, 1, CONNECT_S - 1) is None
        assert caplog.text == ""
        assert found.record_after(CONNECT_S, 2 * CONNECT_S) == UnconnectedRanks(count=4, unit="rank")
    (warning,) = (record.message for record in caplog.records)
    assert "ranks 1, 2, 3 have not connected to rank 0, so each may be training its own model: 60 s after" in warning
    assert f"127.0.0.1:{rank.port}" in warning
    assert "init_process_group()" in warning
    assert "run.independent_ranks=true" in warning
    # and withdrawn when they do
    found.do(f"serve({rank.port})")
    assert found.record_after(3 * CONNECT_S) is None
    assert "rank 0 has a connection now" in caplog.records[-1].message


def test_lightning_is_named_with_what_to_pass(rank, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)
    found = rank(script=("train.py",))
    assert found.record_after(0, CONNECT_S).text.endswith("so each may be training its own model with Lightning")
    assert 'pass devices=1, num_nodes=1, strategy="ddp" to Lightning\'s Trainer' in caplog.records[-1].message


def test_a_launcher_that_the_program_hides_is_named_with_what_to_write(rank, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)
    (tmp_path / "torchrun").write_text(RANK)
    found = rank(script=("torchrun",))
    assert found.record_after(0, CONNECT_S).text.endswith("so each may be training its own model with torchrun")
    assert "write run.processes=node before --" in caplog.records[-1].message


def test_ranks_with_a_connection_are_not_warned_about(rank):
    # at the address that the ranks are given
    found = rank()
    found.do(f"serve({rank.port})")
    assert found.record_after(0, CONNECT_S) is None
    # elsewhere, as with init_method=file://: another rank connects to this one, or this one to another
    found = rank()
    port = int(found.do("serve()"))
    with socket.create_connection(("127.0.0.1", port)):
        found.do("rest[-1][0].accept()")
        assert found.record_after(0, CONNECT_S) is None
    found = rank()
    with socket.create_server(("127.0.0.1", 0)) as other:
        found.do(f"call({other.getsockname()[1]})")
        assert found.record_after(0, CONNECT_S) is None
    # it is remembered
    assert found.record_after(2 * CONNECT_S) is None


def test_programs_that_need_not_connect_are_not_warned_about(rank):
    assert rank(world_size=1).record_after(0, CONNECT_S) is None
    assert rank(independent_ranks=True).record_after(0, CONNECT_S) is None
    with_mpi = rank()
    with_mpi.do("load('libmpi.so.40')")
    assert with_mpi.record_after(0, CONNECT_S) is None


def _low_port():
    """A free port that the kernel doesn't choose by itself."""
    for port in range(20_000, 32_000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError
