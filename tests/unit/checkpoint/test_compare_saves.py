from __future__ import annotations

import json
import math
import os
import pickle
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from hpctrain.checkpoint.compare_saves import NOT_FINITE, compare_saves, compare_tensors, main
from hpctrain.checkpoint.saved_tensors import parts_of, read_part


class Stage(Enum):
    FIRST = 1


class Tracker:
    def __init__(self):
        self.mean = torch.tensor([0.5])
        self.count = 7


class Attributes(dict):
    pass


class Wrapper(torch.Tensor):
    """A tensor around another one, as DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        found = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(one.inner if isinstance(one, Wrapper) else one for one in args), **(kwargs or {}))


class Executed:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def values(saved):
    return {name: read().tolist() for name, read in saved.tensors.items()}


def trained():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1, "loss": 0.25, "name": "run 1"}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch(tmp_path, zipped):
    state = trained()
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    saved = read_part(tmp_path / "a.pt")
    assert saved.tensors.keys() >= {"model.weight", "model.bias", "optimizer.state.0.exp_avg"}
    assert torch.equal(saved.tensors["model.weight"](), state["model"]["weight"])
    assert (saved.numbers["step"], saved.numbers["optimizer.param_groups.0.lr"]) == (1, 0.001)


def test_objects_of_other_classes_are_looked_into_and_not_made(tmp_path):
    state = {
        "tracker": Tracker(),
        "stage": Stage.FIRST,
        "folder": Path("here"),
        "counts": defaultdict(list, a=[torch.ones(1)]),
        "queue": deque([torch.zeros(1)], maxlen=3),
        "attributes": Attributes(lr=0.5),
        "buffer": nn.Parameter(torch.ones(2)),
        "module": nn.Linear(1, 1, bias=False),
        "ordered": OrderedDict(a=1),
    }
    torch.save(state, tmp_path / "a.ckpt")
    saved = read_part(tmp_path / "a.ckpt")
    weight = state["module"].weight.detach().tolist()
    assert values(saved) == {
        "tracker.mean": [0.5],
        "counts.a.0": [1.0],
        "queue.0": [0.0],
        "buffer": [1.0, 1.0],
        "module._parameters.weight": weight,
    }
    assert saved.numbers["tracker.count"] == 7
    assert saved.numbers["attributes.lr"] == 0.5


def test_no_tensor_hides_another_one(tmp_path):
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: 1, "0": 2}, tmp_path / "a.pt")
    saved = read_part(tmp_path / "a.pt")
    assert sorted(values(saved).values()) == [[0], [1]]
    assert sorted(saved.numbers.values()) == [1, 2]


def test_a_tensor_around_another_one(tmp_path):
    torch.save({"w": Wrapper(torch.ones(2))}, tmp_path / "a.pt")
    (inner,) = values(read_part(tmp_path / "a.pt")).values()
    assert inner == [1, 1]


def test_random_states_of_numpy(tmp_path):
    state = {"numpy": np.random.RandomState(3).get_state(), "value": np.float64(1.5), "big": np.arange(4, dtype=">i4")}
    torch.save(state, tmp_path / "random_states_0.pkl")  # as Accelerate names a file of torch
    saved = read_part(tmp_path / "random_states_0.pkl")
    keys = saved.tensors["numpy.1"]()
    assert keys.tolist() == state["numpy"][1].tolist()
    assert (saved.tensors["value"]().item(), saved.tensors["big"]().tolist()) == (1.5, [0, 1, 2, 3])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_plain_pickle(tmp_path, protocol):
    value = {"w": torch.ones(2), "array": np.arange(3), "fortran": np.arange(6).reshape(2, 3, order="F")}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(value, protocol=protocol))
    saved = read_part(tmp_path / "a.pkl")
    assert values(saved) == {"w": [1, 1], "array": [0, 1, 2], "fortran": value["fortran"].tolist()}


def test_numpy_and_safetensors(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "b.npz", w=np.ones(2, np.float32), names=np.array(["x"]))
    save_file({"v": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "c.safetensors")
    assert values(read_part(tmp_path / "a.npy")) == {"array": [0, 1, 2]}
    assert values(read_part(tmp_path / "b.npz")) == {"w": [1, 1], "names": [120, 0, 0, 0]}
    assert values(read_part(tmp_path / "c.safetensors")) == {"v": [1, 1]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_dcp(tmp_path):
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 5, "kept": {"x": [torch.ones(2), Tracker()]}}
    dcp.save(state, checkpoint_id=tmp_path / "step_5")
    saved = read_part(tmp_path / "step_5")
    assert values(saved) == {"model.w": [[0, 1, 2], [3, 4, 5]], "kept.x.0": [1, 1], "kept.x.1.mean": [0.5]}
    assert (saved.numbers["step"], saved.numbers["kept.x.1.count"]) == (5, 7)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_in_a_save_is_executed(tmp_path):
    made = tmp_path / "made"
    torch.save({"w": torch.ones(1), "bad": Executed(made)}, tmp_path / "a.pt")
    torch.save(Executed(made), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "b.pkl").write_bytes(pickle.dumps([torch.ones(1), Executed(made)]))
    dcp.save({"w": torch.ones(1), "bad": Executed(made)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp2").mkdir()
    (tmp_path / "dcp2/.metadata").write_bytes(pickle.dumps(Executed(made)))
    assert values(read_part(tmp_path / "a.pt")) == {"w": [1.0]}
    assert values(read_part(tmp_path / "old.bin")) == {}
    assert values(read_part(tmp_path / "b.pkl")) == {"0": [1.0]}
    assert values(read_part(tmp_path / "dcp")) == {"w": [1.0]}
    with pytest.raises(AttributeError):
        read_part(tmp_path / "dcp2")
    assert not made.exists()


def test_a_function_that_rebuilds_nothing_is_not_called(tmp_path):
    # a function in torch, and the result of a placeholder
    program = b"ctorch\nload\n(S'made'\ntR."
    (tmp_path / "a.pkl").write_bytes(program)
    assert values(read_part(tmp_path / "a.pkl")) == {}
    (tmp_path / "b.pkl").write_bytes(b"cbuiltins\ngetattr\n(cbuiltins\nset\nS'add'\ntR(S'x'\ntR.")
    assert values(read_part(tmp_path / "b.pkl")) == {}
    (tmp_path / "c.pkl").write_bytes(b"]q\x00(tR.")
    with pytest.raises(Exception, match=r"unhashable"):
        read_part(tmp_path / "c.pkl")


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torchscript_program_is_not_executed(tmp_path):
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), tmp_path / "a.pt")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes() + b"x" * (name == "other"))
    found = compare_saves(tmp_path / "one", tmp_path / "other")
    assert "TorchScript" in found.unreadable["a.pt"]


def test_tensors_are_compared_bit_by_bit():
    one = torch.tensor([1.0, -2.0, math.nan, 0.0, math.inf])
    assert compare_tensors("w", one, one.clone()) is None
    other = one.clone()
    other[1] = -2.5
    other[3] = -0.0
    found = compare_tensors("w", one, other)
    assert (found.absolute, found.relative, found.shape, found.dtype) == (0.5, 0.2, (5,), "float32")
    other[0] = math.nan
    assert compare_tensors("w", one, other).problem == NOT_FINITE
    assert compare_tensors("z", torch.zeros(1), -torch.zeros(1)).absolute == 0.0
    assert compare_tensors("w", one, one.double()).problem == "float32 (5,) and float64 (5,)"
    large = torch.tensor([2**62])
    assert compare_tensors("n", large, large + 1).absolute == 1.0
    assert compare_tensors("b", torch.tensor([True]), torch.tensor([False])).absolute == 1.0
    assert compare_tensors("e", torch.empty(0), torch.empty(0)) is None
    assert compare_tensors("s", torch.zeros(5)[::5], torch.ones(1)).absolute == 1.0
    assert compare_tensors("c", torch.tensor([1j]), torch.tensor([2j])).absolute == 1.0
    one = torch.tensor([1.0], dtype=torch.float8_e4m3fn)
    assert compare_tensors("f", one, torch.tensor([2.0], dtype=torch.float8_e4m3fn)).relative == 0.5


def test_tensors_are_compared_in_parts(monkeypatch):
    monkeypatch.setattr("hpctrain.checkpoint.compare_saves.CHUNK", 2)
    one, other = torch.arange(7.0), torch.arange(7.0)
    other[2] += 3
    assert compare_tensors("w", one, other).absolute == 3.0


def folder(path, scale, seed=1):
    path.mkdir()
    save_file({"w": torch.ones(2) * scale}, path / "model.safetensors")
    torch.save({"state": {0: {"m": torch.ones(2)}}, "lr": scale}, path / "optimizer.pt")
    torch.save(Tracker(), path / "training_args.bin")
    torch.save({"last_epoch": seed}, path / "scheduler.pt")
    (path / "trainer_state.json").write_text(json.dumps({"time": seed}))
    return path


def test_folders_are_compared_file_by_file(tmp_path):
    one, other = folder(tmp_path / "one", 1.0), folder(tmp_path / "other", 1.5, seed=2)
    torch.save({"w": torch.ones(1)}, other / "extra.pt")
    (other / "latest").symlink_to(other)
    found = compare_saves(one, other)
    assert (found.tensors, found.equal, found.left_out) == ((3, 4), 2, ["trainer_state.json"])
    assert [(one.name, one.problem, one.relative) for one in found.differing] == [
        ("model.safetensors:w", "", pytest.approx(1 / 3)),
        ("extra.pt:w", "isn't in the first save", None),
    ]
    assert found.numbers == ["optimizer.pt:lr", "scheduler.pt:last_epoch"]


def test_an_unreadable_file_is_compared_by_its_bytes(tmp_path):
    for name, data in (("one", b"abc"), ("other", b"abd")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.pt").write_bytes(b"neither")
        (tmp_path / name / "cut.pt").write_bytes(data)
    found = compare_saves(tmp_path / "one", tmp_path / "other")
    assert found.identical == ["same.pt"]
    assert list(found.unreadable) == ["cut.pt"]


def test_a_link_to_a_save_is_the_save(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    (tmp_path / "last.pt").symlink_to("a.pt")
    assert compare_saves(tmp_path / "a.pt", tmp_path / "last.pt").equal == 1
    assert parts_of(tmp_path / "last.pt") == {"": tmp_path / "last.pt"}


def test_what_is_neither_a_file_nor_a_folder_is_left_out(tmp_path):
    (tmp_path / "inner").mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "inner" / "a.pt")
    (tmp_path / "inner" / "last").symlink_to("removed")
    (tmp_path / "latest").symlink_to("inner")
    os.mkfifo(tmp_path / "pipe")
    assert parts_of(tmp_path) == {"inner/a.pt": tmp_path / "inner" / "a.pt"}


def test_a_sparse_tensor_and_one_that_occurs_twice(tmp_path):
    shared = torch.ones(2)
    torch.save({"a": shared, "b": shared, "sparse": torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    assert values(read_part(tmp_path / "a.pt")) == {
        "a": [1, 1],
        "b": [1, 1],
        "sparse.indices": [[0, 1], [0, 1]],
        "sparse.values": [1, 1],
    }


def test_the_command_prints_json(tmp_path, capsys):
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"w": torch.full((1,), math.nan)}, tmp_path / "b.pt")
    main([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"] == [1, 1]
    assert found["differing"][0]["problem"] == NOT_FINITE
