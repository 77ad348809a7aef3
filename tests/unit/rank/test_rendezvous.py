from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import RendezvousError
from hpctrain.rank.classification import Classification, classify
from hpctrain.rank.rendezvous import meet, open_private_store
from hpctrain.run.reason import Reason

PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_a_file_that_cant_be_opened_in_time(tmp_path: Path) -> None:
    """torch's FileStore would retry for 300 s, without letting another thread of the process run."""
    began = time.monotonic()
    with pytest.raises(RendezvousError) as raised:
        meet(
            ClusterEnvironment.from_environment(PLACE),
            init_method=f"file://{tmp_path}/a/b",
            secret=b"s",
            token="t",
            timeout_s=0.3,
        )
    assert 0.3 <= time.monotonic() - began < 20
    assert re.fullmatch(
        rf"parallel\.init_method: the store's file {tmp_path}/a/b\.[0-9a-f]{{16}} can't be opened on \S+ "
        r"\(No such file or directory\); name a file in a folder that every node can write to",
        str(raised.value),
    )


def test_a_file_of_the_launcher_that_cant_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError) as raised:
        open_private_store(tmp_path / "a" / "store", 2, 60.0)
    assert str(raised.value) == (
        f"the file {tmp_path}/a/store, where the ranks meet, can't be opened in the launcher's folder (No such file or "
        "directory); set TMPDIR to a folder of this machine that isn't cleaned up during the run"
    )


def test_a_file_in_which_no_other_rank_writes(tmp_path: Path) -> None:
    environment = ClusterEnvironment.from_environment(PLACE)
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank zero did not open the store's file .* in 0 s") as raised:
        meet(environment, init_method=f"file://{tmp_path}/store", secret=b"s", token="t", timeout_s=0.3)
    assert time.monotonic() - began < 20
    assert classify(raised.value, 2) == Classification(Reason.INFRASTRUCTURE, blames_peer=True)
