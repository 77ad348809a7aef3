from __future__ import annotations

import json
import logging
import socket
import threading
import time

import pytest
from launchers import STEP, TORCH, derive

from hpctrain.run.start_record import StartRecord, address_of_rank_zero, node_of_ranks, record_start

SWITCHED = STEP | {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node", "SLURMD_NODENAME": "n3"}
ZERO = SWITCHED | {"SLURM_PROCID": "0", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}


def test_a_rank_records_its_node_by_slurms_name(tmp_path):
    began = time.time()
    record_start(tmp_path, derive(SWITCHED))
    record = StartRecord.read(StartRecord.path(tmp_path, 4))
    assert record is not None
    assert (record.rank, record.node, record.host) == (4, "n3", socket.gethostname())
    assert began <= record.time <= time.time()
    record_start(tmp_path, derive(TORCH))  # outside of SLURM
    assert node_of_ranks(tmp_path) == {4: "n3"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": 1}', '{"rank": "1", "node": "n1"}'])
def test_what_can_not_be_read_counts_as_absent(tmp_path, content):
    record_start(tmp_path, derive(SWITCHED))
    (tmp_path / "start_1.json").write_text(content)
    assert node_of_ranks(tmp_path) == {4: "n3"}
    assert StartRecord.read(tmp_path / "start_9.json") is None


def test_fields_of_a_newer_version_are_left_out(tmp_path):
    record_start(tmp_path, derive(SWITCHED))
    path = StartRecord.path(tmp_path, 4)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cores": 8}))
    assert node_of_ranks(tmp_path) == {4: "n3"}


def test_a_folder_that_can_not_be_written_is_logged(tmp_path, caplog):
    record_start(tmp_path / "gone", derive(SWITCHED))
    assert "the start of rank 4 on" in caplog.text
    assert "can't be recorded" in caplog.text


def test_an_address_that_variables_give_needs_no_record(tmp_path):
    assert address_of_rank_zero(tmp_path, derive(STEP)) == "n1"
    assert address_of_rank_zero(tmp_path, derive(SWITCHED | {"MASTER_ADDR": "n2-ib"})) == "n2-ib"
    assert address_of_rank_zero(tmp_path, derive(ZERO)) == "n2"


def test_a_rank_waits_until_rank_zero_has_recorded_its_node(tmp_path):
    timer = threading.Timer(0.3, record_start, (tmp_path, derive(ZERO)))
    timer.start()
    assert address_of_rank_zero(tmp_path, derive(SWITCHED)) == "n2"
    timer.join()
    assert set(node_of_ranks(tmp_path)) == {0, 4}  # its own it wrote again meanwhile


def test_without_a_record_of_rank_zero_the_likeliest_node_is_taken(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hpctrain.run")
    assert address_of_rank_zero(tmp_path, derive(SWITCHED), within_s=0.1) == "n1"
    assert "rank zero recorded no start" in caplog.text
    assert "MASTER_ADDR will be n1" in caplog.text
