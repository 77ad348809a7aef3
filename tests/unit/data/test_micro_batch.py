from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import torch

from hpctrain.data.micro_batch import iterate_tensors, map_tensors

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    image: torch.Tensor
    name: str


@dataclass
class Masked:
    ids: torch.Tensor
    mask: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = self.ids > 1


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
    assert [int(tensor) for tensor in iterate_tensors(doubled)] == [2] * 7
    assert [int(tensor) for tensor in iterate_tensors(batch)] == [1] * 7


def test_a_tensor_that_a_dataclass_makes_itself_is_found() -> None:
    batch = Masked(torch.tensor([1, 2]))
    assert [id(tensor) for tensor in iterate_tensors(batch)] == [id(batch.ids), id(batch.mask)]


@dataclass(frozen=True, slots=True)
class Halved:
    values: torch.Tensor
    made: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.values / 2)
        object.__setattr__(self, "made", self.values + 1)


def test_a_dataclass_is_made_once_however_often_it_is_moved() -> None:
    batch = Halved(torch.tensor(8.0))
    for _ in range(3):
        batch = map_tensors(torch.clone, batch)
    assert (batch.values.item(), batch.made.item()) == (4.0, 5.0)
