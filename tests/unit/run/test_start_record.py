from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from hpctrain.errors import RendezvousError
from hpctrain.run.start_record import StartRecord, address_of_rank_zero, nodes_by_rank
from tests.unit.launchers import STEP, TORCH, derive

SWITCHED = STEP | {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node", "SLURMD_NODENAME": "n3"}
ZERO = SWITCHED | {"SLURM_PROCID": "0", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}


def never() -> bool:
    return False


def test_a_rank_records_its_node_by_slurms_name(tmp_path):
    began = time.time()
    StartRecord.of_this_process(derive(SWITCHED)).write(tmp_path)
    record = StartRecord.read(tmp_path / "start_4.json")
    assert record is not None
    assert (record.rank, record.node, record.host) == (4, "n3", socket.gethostname())
    assert began <= record.time <= time.time()
    StartRecord.of_this_process(derive(TORCH)).write(tmp_path)  # outside of SLURM
    assert nodes_by_rank(tmp_path) == {4: "n3"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": 1}', '{"rank": "1", "node": "n1"}'])
def test_what_can_not_be_read_counts_as_absent(tmp_path, content):
    StartRecord.of_this_process(derive(SWITCHED)).write(tmp_path)
    (tmp_path / "start_1.json").write_text(content)
    assert nodes_by_rank(tmp_path) == {4: "n3"}
    assert StartRecord.read(tmp_path / "start_9.json") is None


def test_fields_of_a_newer_version_are_left_out(tmp_path):
    StartRecord.of_this_process(derive(SWITCHED)).write(tmp_path)
    path = tmp_path / "start_4.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cores": 8}))
    assert nodes_by_rank(tmp_path) == {4: "n3"}


def test_a_folder_that_can_not_be_written_is_logged(tmp_path, caplog):
    StartRecord.of_this_process(derive(SWITCHED)).write(tmp_path / "gone")
    assert "can't write the start record of rank 4 on" in caplog.text


def test_an_address_that_variables_give_needs_no_record(tmp_path):
    assert address_of_rank_zero(tmp_path, derive(STEP), never) == "n1"
    assert address_of_rank_zero(tmp_path, derive(SWITCHED | {"MASTER_ADDR": "n2-ib"}), never) == "n2-ib"
    assert address_of_rank_zero(tmp_path, derive(ZERO), never) == "n2"


def test_a_rank_waits_until_rank_zero_has_recorded_its_node(tmp_path):
    timer = threading.Timer(0.3, StartRecord.of_this_process(derive(ZERO)).write, (tmp_path,))
    timer.start()
    assert address_of_rank_zero(tmp_path, derive(SWITCHED), never) == "n2"
    timer.join()
    assert set(nodes_by_rank(tmp_path)) == {0, 4}  # rank 4 rewrote its own record while it waited


def test_a_wait_without_a_record_of_rank_zero_ends(tmp_path):
    with pytest.raises(RendezvousError, match="expected rank zero's start record, which names its node, within 0 s"):
        address_of_rank_zero(tmp_path, derive(SWITCHED), never, timeout_s=0.1)
    began = time.monotonic()
    assert address_of_rank_zero(tmp_path, derive(SWITCHED), lambda: True) == "n1"
    assert time.monotonic() - began < 10
