"""What the ranks read of their node."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from hpctrain.config.compose import Composer
from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.rank import (
    COPIES,
    RankLog,
    checkpoint_bytes,
    flops_per_s,
    interfaces,
    parse_smi,
    segments,
    write_bytes_per_s,
)
from hpctrain.files import read_json
from hpctrain.rank.interface import own_address

# as drivers from 525 to 560 print it for a healthy H100 and for one that was slowed down, and without ECC
SMI = """\
0, NVIDIA H100 80GB HBM3, 550.54.15, 0, 41, Not Active, Not Active, Not Active
1, NVIDIA H100 80GB HBM3, 550.54.15, 2, 88, Active, Active, Not Active
0, NVIDIA GeForce RTX 3090, 525.60.13, [N/A], 35, Not Active, Not Active, Not Active
not a row
"""
SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm InSegs OutSegs RetransSegs InErrs
Tcp: 1 100 200 3 0
"""


def test_rows_of_nvidia_smi() -> None:
    first, second, third = parse_smi(SMI)
    assert (first["driver"], first["ecc_errors"], first["temperature"]) == ("550.54.15", "0", "41")
    assert (second["hardware_slowdown"], second["power_brake"]) == ("Active", "Not Active")
    assert third["ecc_errors"] == "[N/A]"


def test_segments_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "snmp"
    file.write_text(SNMP)
    assert segments(file) == (200, 3)
    assert segments(tmp_path / "absent") == (0, 0)


def test_interfaces_of_this_machine() -> None:
    names = {name for _, name in socket.if_nameindex()} - {"lo"}
    assert {one["name"] for one in interfaces()} == names
    assert all(one["mbit_per_s"] >= 0 for one in interfaces())
    assert own_address().count(".") in {0, 3}


def test_speeds_are_positive_and_leave_nothing(tmp_path: Path) -> None:
    assert flops_per_s(torch.device("cpu")) > 1e6
    assert write_bytes_per_s(tmp_path, "speed") > 1e3
    assert list(tmp_path.iterdir()) == []


def test_a_record_says_how_far_its_rank_came(tmp_path: Path) -> None:
    folder = DoctorFolder(tmp_path)
    folder.ranks.mkdir()
    record = RankLog(folder, 3, {"node": "n1"})
    record.add(stage="met", devices=["cpu"])
    record.add(error="ValueError: no", traceback="trace")
    assert read_json(folder.rank(3)) == {
        "rank": 3,
        "stage": "met",
        "node": "n1",
        "devices": ["cpu"],
        "error": "ValueError: no",
        "traceback": "trace",
    }


def test_the_size_of_a_checkpoint_is_that_of_weights_and_two_states() -> None:
    config = Composer().compose(["task=text", "model.width=64", "model.num_layers=2"])
    small = checkpoint_bytes(config)
    assert small % (4 * COPIES) == 0
    large = checkpoint_bytes(Composer().compose(["task=text", "model.width=128", "model.num_layers=2"]))
    assert 2 * small < large < 5 * small
