"""The ranks find each other, even if other programs use their ports; or report in time which one is missing."""

from __future__ import annotations

import contextlib
import re
import socket
import time

import pytest


@pytest.fixture
def ports(free_ports):
    return free_ports(3)


@pytest.fixture
def meeting(fork_server, ports):
    """Ranks that meet; `options` is a dict for all of them, or a list with a dict for each."""

    def run(size, options=None, ranks=None, candidates=None):
        each = options if isinstance(options, list) else [options or {}] * size
        numbers = [
            fork_server.start("meeting:be_rank", rank, size, candidates or ports, each[rank])
            for rank in (range(size) if ranks is None else ranks)
        ]
        done = fork_server.wait(*numbers)
        assert all(process.code == 0 for process in done), "\n".join(process.output for process in done)
        return [process.result for process in done]

    return run


@pytest.fixture
def stranger(fork_server, ports, tmp_path):
    """Another run's store at the first port."""
    numbers = []

    def serve(secret):
        numbers.append(fork_server.start("meeting:serve", ports[0], secret, str(tmp_path / "enough")))
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports[0])):
                return
        pytest.fail("nothing listens there")

    yield serve
    (tmp_path / "enough").touch()
    assert [done.code for done in fork_server.wait(*numbers)] == [0]


@pytest.fixture(scope="module", autouse=True)
def mute_meeting(fork_server, free_ports):
    """Two ranks whose first port belongs to a listener that never answers; started early, because it takes seconds."""
    ports = free_ports(2)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", ports[0]))
        mute.listen()
        yield ports, [fork_server.start("meeting:be_rank", rank, 2, ports, {}) for rank in range(2)]


OTHER_SECRET = (
    "if you started the ranks by hand, on nodes without a shared home, "
    "set HPCTRAIN_SECRET to the same value on all ranks"
)


def all_heard(size):
    return [f"hello from {rank}" for rank in range(size)]


def test_the_first_port_is_taken_if_it_is_free(meeting, ports):
    assert meeting(3) == [{"port": ports[0], "heard": all_heard(3)}] * 3


def test_a_late_rank_zero_is_waited_for(meeting, ports):
    assert meeting(2, [{"delay_s": 0.7}, {}]) == [{"port": ports[0], "heard": all_heard(2)}] * 2


@pytest.mark.parametrize("secret", ["another user's", None])
def test_a_port_with_the_store_of_another_run(meeting, stranger, ports, secret):
    stranger(secret)
    assert meeting(3) == [{"port": ports[1], "heard": all_heard(3)}] * 3


def test_no_port_is_free(meeting, ports):
    with socket.socket() as first, socket.socket() as second:
        for port, mute in zip(ports, (first, second), strict=False):
            mute.bind(("127.0.0.1", port))
            mute.listen()
        (answer,) = meeting(2, ranks=[0], candidates=ports[:2])
    assert f"none of its ports free on 127.0.0.1: {ports[0]}, {ports[1]}; set cluster.master_port" in answer["error"]


def test_a_port_that_a_person_chose_has_others_in_reserve(meeting, stranger, ports):
    stranger("another run's")
    first, second = meeting(2, candidates=ports[:1])
    assert ports[0] < first["port"] < ports[0] + 5
    assert first == second


@pytest.mark.parametrize("others", [1, 20])
def test_rank_zero_is_found_on_whichever_node_it_is(meeting, ports, others):
    """SLURM 26.05 has ranks follow the switches: no variable names rank zero's node."""
    nodes = [f"127.0.0.{number + 2}" for number in range(others)]
    zero = {"addresses": ["127.0.0.1"], "delay_s": 0.3}
    assert (
        meeting(3, [zero, *[{"addresses": [*nodes, "127.0.0.1"]}] * 2])
        == [{"port": ports[0], "heard": all_heard(3)}] * 3
    )


def test_no_rank_zero_on_any_node(meeting, ports):
    nodes = ["127.0.0.1", "127.0.0.2"]
    (answer,) = meeting(2, {"timeout_s": 1.0, "addresses": nodes}, ranks=[1])
    assert "rank zero did not answer at any of the nodes 127.0.0.1, 127.0.0.2, ports" in answer["error"]


def test_no_rank_zero(meeting, ports):
    (answer,) = meeting(2, {"timeout_s": 1.0}, ranks=[1])
    assert f"rank zero did not answer at 127.0.0.1, ports {', '.join(map(str, ports))}, in 1 s" in answer["error"]
    assert "Connection refused" in answer["error"]
    assert 1.0 <= answer["seconds"] < 20


def test_only_another_run_answers(meeting, stranger, ports):
    stranger("another run's")
    (answer,) = meeting(2, {"timeout_s": 1.0}, ranks=[1], candidates=ports[:2])
    named = f"the program on port {ports[0]} of 127.0.0.1 is not this run's rank zero"
    assert f"{named}, or has a different secret" in answer["error"]
    assert answer["error"].endswith(OTHER_SECRET)
    assert "cluster.network_interface" not in answer["error"], "the network has carried an answer"
    assert answer["seconds"] < 20


def test_tcp(meeting, ports):
    method = {"init_method": f"tcp://127.0.0.1:{ports[2]}"}
    assert meeting(2, method) == [{"port": ports[2], "heard": all_heard(2)}] * 2


def test_file(meeting, tmp_path):
    method = {"init_method": f"file://{tmp_path}/meeting"}
    assert meeting(3, method) == [{"port": None, "heard": all_heard(3)}] * 3


def test_a_file_of_ranks_that_have_another_secret(meeting, tmp_path):
    method = {"init_method": f"file://{tmp_path}/meeting", "timeout_s": 0.5}
    zero, one = meeting(2, [method, method | {"secret": "another node's"}])
    assert zero["error"].startswith("rank 1 did not arrive")
    assert one["error"].startswith("rank zero did not open the store's file")
    assert one["error"].endswith(OTHER_SECRET)


def test_a_file_that_an_earlier_attempt_left_behind(meeting, fork_server, tmp_path):
    (done,) = fork_server.wait(fork_server.start("meeting:crash", f"{tmp_path}/meeting"))
    assert done.code == 0, done.output
    method = {"init_method": f"file://{tmp_path}/meeting", "token": "2"}
    assert meeting(2, method) == [{"port": None, "heard": all_heard(2)}] * 2


ONE = {"num_nodes": 1}


def test_ranks_of_one_machine_meet_in_a_folder_and_leave_nothing(meeting, tmp_path):
    options = ONE | {"folder": str(tmp_path)}
    assert meeting(3, [options, options | {"delay_s": 0.3}, options]) == [{"port": None, "heard": all_heard(3)}] * 3
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_killed_rank_zero_left(meeting, fork_server, tmp_path):
    """The next attempt may have the same name: that of torchrun, which always takes the same port."""
    (done,) = fork_server.wait(fork_server.start("meeting:leave_folder", str(tmp_path), "t"))
    assert done.code == 0, done.output
    assert list(tmp_path.iterdir())
    options = ONE | {"folder": str(tmp_path)}
    assert meeting(2, [options | {"delay_s": 0.7}, options]) == [{"port": None, "heard": all_heard(2)}] * 2
    assert not list(tmp_path.iterdir())


def test_ranks_of_one_machine_that_dont_share_the_folder(meeting, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    zero, one = meeting(2, [ONE | {"folder": str(folder), "timeout_s": 0.5} for folder in folders])
    assert zero["error"] == "rank 1 did not arrive within 0 s; check their logs"
    assert re.fullmatch(
        rf"rank zero did not make the folder {folders[1]}/hpctrain-[0-9a-f]{{8}}-[0-9a-f]{{16}} in 0 s; check its log "
        rf"first; if the ranks don't share {folders[1]}, give all of them the same TMPDIR, or, in containers, set "
        r"parallel\.init_method=tcp://HOST:PORT",
        one["error"],
    )
    assert not list(folders[0].iterdir())


def test_a_port_where_something_listens_and_never_answers(fork_server, mute_meeting):
    ports, numbers = mute_meeting
    assert [done.result for done in fork_server.wait(*numbers)] == [{"port": ports[1], "heard": all_heard(2)}] * 2
