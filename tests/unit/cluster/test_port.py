import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.port import NUM_CANDIDATES, derived, reserved

jobs = st.integers(0, 2**32)
places = st.tuples(st.integers(0, 150), st.integers(0, 9), st.integers(0, 14))


@given(jobs, st.integers(0, 10**6), st.integers(0, 10**6))
def test_derived_ports_are_distinct_and_neither_privileged_nor_ephemeral(job: int, step: int, restart: int) -> None:
    ports = derived(job=job, step=step, restart=restart)
    assert len(ports) == len(set(ports)) == NUM_CANDIDATES
    assert all(1024 <= port < 32_768 for port in ports)


@given(jobs, places, places)
def test_nearby_jobs_steps_and_restarts_never_share_a_port(
    job: int, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    def first(place: tuple[int, int, int]) -> int:
        return derived(job=job + place[0], step=place[1], restart=place[2])[0]

    assert (first(one) == first(other)) == (one == other)


@given(jobs, st.integers(1, 22_750))
def test_each_coordinate_alone_differs_far_out(job: int, distance: int) -> None:
    here = derived(job=job)[0]
    assert derived(job=job + distance)[0] != here
    assert derived(job=job, step=distance)[0] != here
    assert derived(job=job, restart=distance)[0] != here


@pytest.mark.parametrize(
    ("text", "ports"),
    [("12000-12003", (12000, 12001, 12002, 12003)), ("12000-12001,12005", (12000, 12001, 12005)), ("7", (7,))],
)
def test_reserved(text: str, ports: tuple[int, ...]) -> None:
    assert reserved(text) == ports


@pytest.mark.parametrize("text", ["", "x", "0", "12003-12000", "12000-", "65536", "1-999999", "12000;12001"])
def test_ports_of_an_unknown_form_are_none(text: str) -> None:
    assert reserved(text) == ()
