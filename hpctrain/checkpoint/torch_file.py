"""Write weights as a file that `torch.load` reads, without having all of them in memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain.checkpoint.weight_stream import WeightStream
from hpctrain.files import errors_naming

LINE = "\n"


def write_torch_file(
    path: Path, weights: Mapping[str, WeightStream], versions: object, on_write: Callable[[int], None]
) -> None:
    """Write a new file, and make it durable; `torch.load(path, weights_only=True)` returns the tensors by name.

    Names with the same `WeightStream` share their tensor. As in hpctrain's own files, the CRC-32 fields of the zip
    format don't match, which torch doesn't read.

    Args:
        path: must not exist.
        weights: by name.
        versions: the modules' versions, as `Module.state_dict` returns them in `_metadata`; None without.
        on_write: called with the number of bytes after each write.

    Raises:
        OSError: the file can't be written; a part of it may be left.
    """
    state: OrderedDict[str, Tensor] = OrderedDict()
    made: dict[WeightStream, Tensor] = {}
    with FakeTensorMode():
        for name, weight in weights.items():
            if weight not in made:
                made[weight] = torch.empty(weight.shape, dtype=weight.dtype)
            state[name] = made[weight]
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    # a file with holes in the place of the elements
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
    except RuntimeError as error:
        raise OSError(f"torch: {str(error).partition(LINE)[0]}") from error
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)
    with errors_naming(path), path.open("r+b") as file:
        for weight, name in {weight: name for name, weight in weights.items()}.items():
            file.seek(places[name].untyped_storage()._checkpoint_offset)
            for piece in weight.pieces():
                file.write(piece)
                on_write(len(piece))
        file.flush()
        os.fsync(file.fileno())
