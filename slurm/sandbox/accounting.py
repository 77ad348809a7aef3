"""slurmdbd, and a MariaDB of the sandbox's own under it, on the controller's machine.

The database listens on that machine's own loopback and on a socket in the state directory, so it meets no other
MariaDB of the host. It trades durability for speed: a sandbox is not meant to survive a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import files
from cluster import Cluster
from machine import Machine
from problem import SandboxError

SERVER = "--user=root --bind-address=127.0.0.1 --skip-name-resolve --skip-log-bin --innodb-buffer-pool-size=32M"
CHEAP = "--innodb-log-file-size=8M --innodb-doublewrite=0 --innodb-flush-log-at-trx-commit=0"
GRANT = f"GRANT ALL ON slurm.* TO slurm@'127.0.0.1' IDENTIFIED BY '{files.DATABASE_PASSWORD}';\n"


def start(home: Path, controller: Machine) -> None:
    """Start both, and wait until `sacctmgr` works. The controller of SLURM comes after that.

    Raises:
        SandboxError: One of them doesn't start; the message has its log.
    """
    database, log = home / "database", home / "log" / "mariadb.log"
    database.mkdir(mode=0o700)
    where = ["--no-defaults", f"--datadir={database}", *CHEAP.split()]
    grants = database / "grants.sql"
    grants.write_text(GRANT)
    controller.run("mariadb-install-db", "--user=root", "--skip-test-db", *where)
    server = [*where, *SERVER.split(), f"--socket={database}/socket", f"--pid-file={database}/pid"]
    controller.run("sh", "-c", f'setsid mariadbd "$@" >{log} 2>&1 &', "sh", *server, f"--init-file={grants}")
    ping = ["mariadb-admin", "--no-defaults", f"--socket={database}/socket", "ping"]
    _wait(lambda: controller.run(*ping), log)
    conf = home / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(files.slurmdbd_conf(home))
    controller.run("slurmdbd")
    _wait(lambda: Cluster(home).ask("sacctmgr", "--immediate", "add", "cluster", home.name), home / "log/slurmdbd.log")


def _wait(works: Callable[[], str], log: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            works()
            return
        except SandboxError as error:
            if time.monotonic() > deadline:
                printed = log.read_text(errors="replace") if log.exists() else ""
                raise SandboxError(f"{error}\n{printed[-2000:]}") from error
        time.sleep(0.05)
