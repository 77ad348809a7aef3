"""GPUs in requests, and in what nodes print."""

from __future__ import annotations

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.scheduler.gres import Gpus, SiteGpus, gpus_of


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu", [("", 1)]),
        ("gpu:4", [("", 4)]),
        ("gpu:a100", [("a100", 1)]),
        ("gpu:a100:4", [("a100", 4)]),
        ("gpu:3090:2", [("3090", 2)]),
        ("gpu:3090", [("", 3090)]),
        ("gpu:2K", [("", 2048)]),
        ("gpu:1g.5gb:7", [("1g.5gb", 7)]),
        ("gpu=2", [("", 2)]),
        ("gres/gpu:a100=2", [("a100", 2)]),
        ("gres:gpu:1", [("", 1)]),
        ("nvme:1,gpu:2", [("", 2)]),
        ("gpu:a100:1,gpu:h100:2", [("a100", 1), ("h100", 2)]),
        ("gpu:a100:2(S:0,2),gpu:h100:2(S:1),nvme:4", [("a100", 2), ("h100", 2)]),
        ("(null)", []),
        ("shard:1,gpu_memory:40,vgpu:1", []),
        ("", []),
    ],
)
def test_the_gpus_of_a_text(gres: str, gpus: list[tuple[str, int]]) -> None:
    assert gpus_of(gres) == tuple(Gpus(*each) for each in gpus)


@pytest.mark.parametrize("gres", ["gpu:", "gpu:a100:2:3", "gpu:a b"])
def test_gpus_that_cannot_be_parsed(gres: str) -> None:
    with pytest.raises(SchedulerError, match=f"expected GPUs such as gpu:4 or gpu:a100:4, found {gres}"):
        gpus_of(gres)


@pytest.mark.parametrize("gres", ["gpu:" + "9" * 5000, "gpu:a100:" + "9" * 5000], ids=["count", "type"])
def test_a_number_that_python_does_not_convert(gres: str) -> None:
    with pytest.raises(SchedulerError, match="expected GPUs such as gpu:4 or gpu:a100:4, found gpu:") as caught:
        gpus_of(gres)
    assert len(str(caught.value)) < 300


def test_the_types_of_a_site_and_where_they_are() -> None:
    gpus = {"a100": "gpu:a100:4(S:0-1)", "h100": "gpu:h100:8", "both": "gpu:h100:4,gpu:a100:1", "old": "gpu:2"}
    records = [{"Partitions": f"{name},all", "Gres": gres} for name, gres in gpus.items()]
    site = SiteGpus.of_nodes([*records, records[0], {"Partitions": "cpu", "Gres": "(null)"}, {}])
    assert len(site.nodes) == 5
    assert site.types == ["a100", "h100"]
    assert site.descriptions == ["a100 (1 or 4 per node, on 3 nodes)", "h100 (4 or 8 per node, on 2 nodes)"]
    assert site.of_partitions("h100").descriptions == ["h100 (8 per node, on 1 node)"]
    assert site.of_partitions("h100,a100").types == ["a100", "h100"]
    assert site.of_partitions("old").types == site.of_partitions("cpu").types == []
    assert site.of_partitions(None) == site
    assert site.partitions_of("h100") == ["all", "both", "h100"]
    assert site.of_partitions("both").counts == [5]
