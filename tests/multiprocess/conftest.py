from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.files import read_json_lines
from hpctrain.launch.local import rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from tests.support.fork_server import clean_environment


@pytest.fixture(scope="session")
def variables():
    """The environment of every process."""
    return clean_environment()


@pytest.fixture(scope="session")
def free_ports():
    """Finds ports that nothing uses, outside of the range that the kernel hands out."""

    def find(count):
        found = set()
        while len(found) < count:
            port = random.SystemRandom().randrange(10_000, 32_000)
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                found.add(port)
        return list(found)

    return find


@pytest.fixture
def port(free_ports):
    (port,) = free_ports(1)
    return port


@pytest.fixture
def ranks(fork_server, port):
    """Call a function in `world_size` processes that get their place from torchrun's variables, and wait for all."""

    def run(target, *arguments, world_size, **variables):
        places = [rank_variables(rank, world_size, port) for rank in range(world_size)]
        return fork_server.wait(*(fork_server.start(target, *arguments, **place, **variables) for place in places))

    return run


class Run:
    """The contents of a run directory."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory.at(path)

    @property
    def attempts(self):
        return [(entry.start_step, str(entry.reason), entry.end_step) for entry in Ledger(self.directory).attempts()]

    @property
    def digest(self) -> str:
        """Of the newest checkpoint's weights."""
        return list_checkpoints(self.directory)[-1].weights_digest

    @property
    def steps(self):
        return [info.step for info in list_checkpoints(self.directory) if info.intact]

    @property
    def metrics(self):
        """Records without what depends on the clock."""
        return [
            {
                name: value
                for name, value in record.items()
                if name != "time" and not name.startswith(("throughput/", "memory/"))
            }
            for record in read_json_lines(self.directory.metrics)
        ]


@pytest.fixture
def run_at():
    """Reads a run directory."""
    return Run


@pytest.fixture(scope="session")
def composer():
    return Composer()


@pytest.fixture
def train(fork_server, ranks, composer, tmp_path, monkeypatch):
    """Start or resume a run: one rank as `cluster=local` does, in the launching process; several as a launcher does.

    Composing takes longer than all the rest, so it is done here, once per configuration. All ranks must end with the
    exit code that is returned; with ``alike=False``, it is the smallest one.
    """
    prepared = {}

    def run(name, *words, world_size=1, target="command:rank", alike=True, **variables):
        path = tmp_path / name
        if prepared.get(path) != words:
            prepare(composer.compose([f"run_dir={path}", *words], world_size=world_size), words)
            prepared[path] = words
        if world_size == 1:
            done = fork_server.wait(fork_server.start("command:run", "resume", str(path), folder=tmp_path, **variables))
        else:
            done = ranks(target, str(path), world_size=world_size, **variables)
        codes = {process.code for process in done}
        if alike:
            assert len(codes) == 1, "\n".join(f"exit code {process.code}\n{process.output}" for process in done)
        return min(codes), Run(path), done[0].output

    return run
