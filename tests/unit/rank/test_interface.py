from __future__ import annotations

import socket

import pytest

from hpctrain.rank import interface
from hpctrain.rank.interface import choose_interface, interface_addresses, interfaces_to


@pytest.fixture
def leading():
    """Name and address of this machine's interface with one, if it has one."""
    found = [(name, address) for name, address in interface_addresses().items() if address]
    if not found:
        pytest.skip("this machine has only the loopback")
    return found[0]


def test_the_loopback_leads_to_no_node():
    assert interfaces_to(["127.0.0.1", "no.such.node.invalid"]) == set()


@pytest.mark.parametrize("own", ["127.0.1.1", "10.1.1.1"])
def test_where_the_own_name_is_a_loopback_address_gloo_gets_the_interface_to_the_nodes(monkeypatch, leading, own):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: own)
    variables: dict[str, str] = {}
    name, address = leading
    choose_interface(None, [address], variables)
    # the route to an address of this machine is the loopback, with that address
    assert variables == ({"GLOO_SOCKET_IFNAME": name} if own.startswith("127.") else {})


def test_what_the_user_chose_stays(monkeypatch, leading):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    variables = {"GLOO_SOCKET_IFNAME": "ib0"}
    choose_interface(None, [leading[1]], variables)
    choose_interface("ib1", [], variables)
    assert variables == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1"}


def test_without_a_way_to_the_nodes_a_line_says_what_to_set(monkeypatch, caplog):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(interface.log, "propagate", True)
    choose_interface(None, ["127.0.0.1"], variables := {})
    assert variables == {}
    assert "resolves to 127.0.1.1, which other nodes can't reach: set cluster.network_interface to" in caplog.text
