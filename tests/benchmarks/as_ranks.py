"""A benchmark that starts itself again as the ranks of one node."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from hpctrain.launch.local import free_port, rank_variables


def run_as_ranks(count: int) -> NoReturn:
    """Start this script on so many ranks, with the same arguments, and end as they do."""
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | rank_variables(rank, count, port))
        for rank in range(count)
    ]
    sys.exit(max(abs(rank.wait()) for rank in ranks))
