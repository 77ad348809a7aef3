"""Images as PNG (W3C, Portable Network Graphics, second edition), a batch as a grid."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np

from hpctrain.metrics.media.host_array import Array

CHANNELS = {1: 0, 3: 2, 4: 6}
"""PNG's colour type by the number of channels."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GAP = 2
"""Pixels between the images of a grid."""


def has_image_shape(shape: tuple[int, ...]) -> bool:
    """Whether it is that of an image, or of a batch: [H, W], [C, H, W] or [H, W, C] with C of 1, 3 or 4, or one more.

    A batch has its channels, too: [N, C, H, W] or [N, H, W, C].
    """
    if 0 in shape:
        return False
    return len(shape) == 2 or (len(shape) in (3, 4) and (shape[-3] in CHANNELS or shape[-1] in CHANNELS))


def png_of(values: Array) -> bytes:
    """Encode an image, or a batch of them as a grid.

    Args:
        values: of a shape that `has_image_shape` accepts; uint8, bool, or floats, which are clipped to [0, 1].
    """
    if values.ndim == 2:
        values = values[None]
    if values.shape[-3] in CHANNELS:
        values = np.moveaxis(values, -3, -1)
    return png(_grid(_pixels(values)))


def png(pixels: Array) -> bytes:
    """Encode pixels: uint8 of shape [H, W, C], with C of 1, 3 or 4."""
    height, width, channels = pixels.shape
    # each row begins with the number of its filter: 0, none
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, CHANNELS[channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b"")
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height of a PNG; zeros if it isn't one."""
    if data[:8] != _SIGNATURE or len(data) < 24:
        return 0, 0
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _pixels(values: Array) -> Array:
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    if values.dtype == np.uint8:
        return values
    scaled: Array = np.clip(np.nan_to_num(values), 0, 1) * 255 + 0.5
    return scaled.astype(np.uint8)


def _grid(pixels: Array) -> Array:
    if pixels.ndim == 3:
        return pixels
    number, height, width, channels = pixels.shape
    if number == 1:
        first: Array = pixels[0]
        return first
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    grid = np.zeros((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), np.uint8)
    for index, one in enumerate(pixels):
        top, left = index // columns * (height + _GAP), index % columns * (width + _GAP)
        grid[top : top + height, left : left + width] = one
    return grid
