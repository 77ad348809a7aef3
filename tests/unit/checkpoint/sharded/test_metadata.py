from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpctrain.checkpoint.saved_tensors import DistributedFolder
from hpctrain.checkpoint.sharded.chunk_file import encode_metadata

EDGES = {
    "rows": ((7, 5), [2, 2, 6], []),
    "columns": ((7, 5), [], [1, 4]),
    "both": ((7, 5), [3], [0, 4]),
    "more_ranks_than_rows": ((2, 5), [1, 2, 2], []),
    "vector": ((9,), [4]),
    "scalar": ((),),
    "nothing": ((0, 4), [], [2]),
}
"""Shape, and where it is cut; equal edges are shards without elements."""
TYPES = ["bfloat16", "float16", "float32", "float64", "int64", "bool", "uint8"]


@pytest.fixture(params=TYPES)
def saved(request, tmp_path, values, cut, write):
    """What three ranks wrote, and the tensors by their paths in nested dicts; names of parameters have dots."""
    wholes, paths, ranks = {}, {}, [[], [], []]
    for number, (kind, (shape, *edges)) in enumerate(EDGES.items()):
        own = {
            ("model", f"layers.0.{kind}"): request.param,
            ("ema", f"layers.0.{kind}"): "float64",
            ("optimizer", "state", f"layers.0.{kind}", "exp_avg"): request.param,
        }
        for path, dtype in own.items():
            paths[".".join(path)] = path
            wholes[path] = values(shape, dtype, seed=len(wholes))
            for place, chunk in enumerate(cut(".".join(path), wholes[path], *edges)):
                ranks[(number + place) % 3].append(chunk)
    folder = tmp_path / "save"
    index = write(folder, *ranks)
    (folder / ".metadata").write_bytes(encode_metadata(index, paths))
    return folder, wholes


def nested(wholes):
    found = {}
    for (*above, last), tensor in wholes.items():
        place = found
        for key in above:
            place = place.setdefault(key, {})
        place[last] = tensor
    return found


def assert_same(found, wholes):
    for path, tensor in wholes.items():
        place = found
        for key in path:
            place = place[key]
        assert place.dtype == tensor.dtype
        assert torch.equal(place, tensor), path


# as in any script that loads in one process
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_loads_it(saved):
    folder, wholes = saved
    state = nested({path: torch.ones_like(tensor) for path, tensor in wholes.items()})
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    assert_same(state, wholes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_loads_the_model_alone(saved):
    folder, wholes = saved
    model = {path: tensor for path, tensor in wholes.items() if path[0] == "model"}
    state = nested({path: torch.ones_like(tensor) for path, tensor in model.items()})
    dcp.load(state, checkpoint_id=folder)
    assert_same(state, model)


def test_plain_torch_converts_it(saved, tmp_path):
    folder, wholes = saved
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt", weights_only=True), wholes)


def test_plain_torch_describes_it(saved):
    folder, wholes = saved
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.planner_data == {".".join(path): path for path in wholes}
    for path, tensor in wholes.items():
        described = metadata.state_dict_metadata[".".join(path)]
        assert (described.size, described.properties.dtype) == (tensor.shape, tensor.dtype)
        assert sum(chunk.sizes.numel() for chunk in described.chunks) == tensor.numel()


def test_the_drill_reads_it(saved):
    folder, wholes = saved
    read = DistributedFolder(folder)
    assert set(read.tensors) == {".".join(path) for path in wholes}
    assert all(torch.equal(read.tensor(".".join(path)), tensor) for path, tensor in wholes.items())
