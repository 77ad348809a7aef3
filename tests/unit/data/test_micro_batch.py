from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from hpctrain.data.micro_batch import map_tensors, tensors_of

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    image: torch.Tensor
    name: str


def test_tensors_are_found_and_replaced_in_every_container() -> None:
    one = torch.tensor(1)
    batch = {
        "tensor": one,
        "list": [one, "text", 3],
        "tuple": (one, None),
        "named": Pair(one, [one]),
        "ordered": OrderedDict(inner=one),
        "dataclass": Sample(one, "cat"),
    }
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert doubled["list"][1:] == ["text", 3]
    assert isinstance(doubled["named"], Pair)
    assert isinstance(doubled["ordered"], OrderedDict)
    assert doubled["dataclass"].name == "cat"
    assert [int(tensor) for tensor in tensors_of(doubled)] == [2] * 7
    assert [int(tensor) for tensor in tensors_of(batch)] == [1] * 7
