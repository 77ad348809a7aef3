"""What the sandbox needs of the machine, and what to type where something is missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from options import Options
from problem import SandboxError

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
OCI_PACKAGES = {"runc": "runc"}


def check(options: Options) -> None:
    """Return if a sandbox can run here.

    Raises:
        SandboxError: It can't; exit code 2.
    """
    check_root()
    wanted = PACKAGES | (ACCOUNTING_PACKAGES if options.accounting else {})
    wanted |= OCI_PACKAGES if options.oci else {}
    missing = sorted({package for program, package in wanted.items() if shutil.which(program) is None})
    if missing:
        install = f"apt-get install --no-install-recommends {' '.join(missing)}"
        where = "" if shutil.which("apt-get") else " on Debian or Ubuntu; this machine is neither"
        raise SandboxError(f"missing here: {', '.join(missing)}. Type: {install}{where}", exit_code=2)


def check_root() -> None:
    """Return if this process is root on Linux, with the folders of system programs on its PATH.

    Raises:
        SandboxError: It is not; exit code 2.
    """
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox is made of Linux namespaces; this is {sys.platform}", exit_code=2)
    if os.geteuid() != 0:
        raise SandboxError(
            f"the sandbox needs root for its namespaces; this is user {os.geteuid()}. "
            f"Type: sudo {sys.executable} {Path(__file__).parent} ...",
            exit_code=2,
        )
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
