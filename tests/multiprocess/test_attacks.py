"""A program of another user of this machine gets nothing into a run by the ranks' store."""

from __future__ import annotations

import os
import pickle

import pytest

from hpctrain.rank.sealed_store import Handshake
from hpctrain.run.temporary_folder import first_part
from tests.multiprocess.programs.meeting import WAITS_FOR_REPLACEMENT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Evil:
    """A pickle that ends whoever opens it."""

    def __reduce__(self):
        return (os._exit, (66,))


EVIL = pickle.dumps(Evil()).hex()


@pytest.fixture
def ports(free_ports):
    return free_ports(2)


@pytest.fixture
def rank(fork_server, ports):
    def start(number, **options):
        return fork_server.start("meeting:be_rank", number, 2, ports, {"timeout_s": 20.0} | options)

    return start


def results(fork_server, *numbers):
    done = fork_server.wait(*numbers)
    assert all(process.code == 0 for process in done), "\n".join(process.output for process in done)
    return [process.result for process in done]


def test_nobody_enters_where_ranks_of_one_machine_meet(fork_server, rank, ports):
    token = f"attacked at port {ports[0]}"
    options = {"num_nodes": 1, "token": token}
    intruder = fork_server.start("attacking:enter", ports[0], f"{first_part()}{Handshake(b's', token).name}")
    first, second, outcomes = results(fork_server, rank(0, **options), rank(1, delay_s=1.0, **options), intruder)
    assert outcomes == ["PermissionError"] * 4 + ["ConnectionRefusedError"]
    assert first == second == {"port": None, "heard": ["hello from 0", "hello from 1"]}


def test_nobody_takes_the_place_of_a_rank(fork_server, rank, ports):
    zero, intruder, one = rank(0), fork_server.start("attacking:take_place", ports[0], EVIL), rank(1, delay_s=2.0)
    heard = {"port": ports[0], "heard": ["hello from 0", "hello from 1"]}
    first, found, second = results(fork_server, zero, intruder, one)
    assert "hpctrain/zero" in found["keys"], "an intruder may list the keys, so that no key is a secret"
    assert not found["welcome"]
    assert (first, second) == (heard, heard)


def test_a_value_that_an_intruder_replaced_is_not_used(fork_server, rank, ports):
    ranks = [rank(0, **WAITS_FOR_REPLACEMENT), rank(1)]
    intruder = fork_server.start("attacking:replace_values", ports[0], EVIL)
    results(fork_server, intruder)
    zero, _ = fork_server.wait(*ranks)  # rank one loses rank zero, and with it the store
    assert "no rank of this attempt wrote the value of rank 1 in the store" in zero.result["error"]


def test_a_recorded_rank_zero_is_found_out(fork_server, rank, ports, free_ports):
    zero, recorder = rank(0), fork_server.start("attacking:record", ports[0])
    (recorded,) = results(fork_server, recorder)
    (other,) = free_ports(1)
    impostor = fork_server.start("attacking:serve_recorded", other, recorded["zero"], 20)
    one = fork_server.start("meeting:be_rank", 1, 2, [other], {"timeout_s": 20.0})
    answer, seen = results(fork_server, one, impostor)
    assert seen["seen"]
    assert "this attempt's rank zero did not write the answer to rank 1 in the store" in answer["error"]
    results(fork_server, rank(1), zero)
