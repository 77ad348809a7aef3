"""Samples from the bytes of their files, by extension."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def decode_by_extension(extension: str, data: bytes) -> Any:
    """The value of a file of a sample; what follows the last dot of its name decides.

    Images become RGB, uint8 of shape [3, height, width], by Pillow; ``json`` its object; ``txt`` a string; ``cls`` and
    ``id`` an integer; ``npy`` a tensor; ``pt`` and ``pth`` what `torch.load` returns with `weights_only`. Any other
    file stays bytes.

    Args:
        extension: all that follows the first dot of the name, in lower case.
        data: the content of the file.
    """
    decode = _BY_EXTENSION.get(extension.rpartition(".")[2])
    return data if decode is None else decode(data)


def _image(data: bytes) -> Tensor:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        # not `asarray`: Pillow's own memory is read-only, and torch warns about that
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _array(data: bytes) -> Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))


def _saved(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_BY_EXTENSION: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "pbm", "tif", "tiff"), _image),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "count"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("pt", "pth"), _saved),
    "json": json.loads,
    "npy": _array,
}
