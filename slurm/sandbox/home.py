"""The state directory of one sandbox: its lock, its record, and the subnet that is its own."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network
from pathlib import Path

from options import Options
from problem import SandboxError

BASE = Path("/run/slurm-sandbox")
RANGES = (IPv4Network("198.18.0.0/16"), IPv4Network("10.213.0.0/16"))  # the first is RFC 2544's: routed nowhere
NETWORKS = [network for wide in RANGES for network in wide.subnets(new_prefix=24)]
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
CONTROLLER = "ctl"


@dataclass(frozen=True)
class Record:
    """The record of a sandbox, in its state directory.

    Attributes:
        options: What `up` was asked for.
        network: Index into NETWORKS; no two sandboxes have the same.
        ready: Whether `up` has finished.
    """

    options: Options
    network: int
    ready: bool = False

    @property
    def link(self) -> str:
        """The one network interface that the sandbox adds to the host."""
        return f"sandbox{self.network}"

    def address(self, machine: str) -> str:
        """The address of a node, of the controller, or of the host on the sandbox's network."""
        last_byte = {CONTROLLER: 253, "host": 254}.get(machine) or int(machine.removeprefix("n"))
        return str(NETWORKS[self.network][last_byte])

    def mac(self, machine: str) -> str:
        """The MAC address of a machine; a revived node keeps it, so that no peer has a stale neighbour entry."""
        return "02:53:42:" + ":".join(f"{int(byte):02x}" for byte in self.address(machine).split(".")[1:])


class Home:
    """The state directory of the sandbox of one name.

    Raises:
        SandboxError: The name isn't valid.
    """

    def __init__(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise SandboxError(
                f"--name {name!r}: expected a lower-case letter, then up to 30 letters, digits and dashes", exit_code=2
            )
        self.name = name
        self.path = BASE / name

    def record(self) -> Record | None:
        """The record, or None where there is no sandbox of this name."""
        try:
            fields = json.loads((self.path / "record.json").read_text())
        except FileNotFoundError:
            return None
        # a sandbox of another checkout may have options that this one doesn't know
        options = {name: value for name, value in fields.pop("options").items() if name in Options.__dataclass_fields__}
        return Record(Options(**options), **fields)

    def write(self, record: Record) -> None:
        """Keep the record; a reader sees the old one or the new one, whole."""
        new = self.path / "record.json.new"
        new.write_text(json.dumps(asdict(record), indent=1))
        new.rename(self.path / "record.json")

    def claim_network(self, options: Options) -> Record:
        """Write and return a record with a network that neither a sandbox nor a route of this machine has.

        Raises:
            SandboxError: All are taken.
        """
        with _locked(BASE):
            others = [other.network for name in names() if (other := Home(name).record())]
            routes = _routes()
            for index, network in enumerate(NETWORKS):
                record = Record(options, index)
                if index in others or Path("/sys/class/net", record.link).exists():
                    continue
                if not any(network.overlaps(route) for route in routes):
                    self.write(record)
                    return record
        raise SandboxError(f"every network in {' and '.join(map(str, RANGES))} is taken: see ip route show table all")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One command at a time on this sandbox. Makes the state directory."""
        with _locked(self.path):
            yield

    def empty(self) -> None:
        """Delete what the state directory holds, the record last, since it names what else has to be cleaned up.

        Raises:
            SandboxError: Something can't be deleted.
        """
        for path in sorted(self.path.iterdir(), key=lambda path: path.name == "record.json"):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise SandboxError(f"{error}: something is still mounted there, or writes to it") from error

    def remove_unclaimed(self) -> None:
        """Delete the state directory where there is no record in it: its `up` was interrupted before that."""
        if not self.path.exists() or self.record() is not None:
            return
        with self.locked():
            if not any(self.path.iterdir()):
                self.remove()

    def remove(self) -> None:
        """Delete the state directory, and the one of all sandboxes with the last of them."""
        self.empty()
        with _locked(BASE), suppress(OSError):
            self.path.rmdir()
            BASE.rmdir()  # refused while other sandboxes live there


def _routes() -> list[IPv4Network]:
    command = ["ip", "-4", "-json", "route", "show", "table", "all"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [IPv4Network(route["dst"]) for route in json.loads(shown or "[]") if route["dst"] != "default"]


def names() -> list[str]:
    """The sandboxes of this machine."""
    return sorted(path.name for path in BASE.glob("*") if NAME.fullmatch(path.name) and path.is_dir())


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory itself, so that no lock file is left behind."""
    while True:
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_still(directory, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def _is_still(directory: Path, descriptor: int) -> bool:
    """Whether the path is still the directory that was opened: another process may have removed it meanwhile."""
    try:
        return os.path.samestat(directory.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
