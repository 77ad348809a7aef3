"""Media that a task logs: check and copy one when it is logged, to encode it later in another thread."""

from __future__ import annotations

import io
import json
import math
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.attempt.lost_gpu import retain_if_gpu_lost
from hpctrain.errors import TaskError
from hpctrain.tasks.log import MediumKind

Array = NDArray[Any]


class HostArray:
    """A copy of a tensor or array, which nothing that happens to the original changes.

    A copy from a GPU goes to page-locked memory, and only `values` waits for it.

    Args:
        content: a tensor on any device, or what `np.asarray` takes.

    Attributes:
        shape: of the values.
        num_bytes: that the copy takes.
        dtype: its name, such as ``uint8``.
        dtype_kind: of the values, as NumPy's `dtype.kind` names it: `f` for floating-point numbers.
    """

    def __init__(self, content: Any) -> None:
        self._event: torch.cuda.Event | None = None
        if isinstance(content, Tensor):
            self._content: Tensor | Array = self._copied(content.detach())
            self.dtype_kind = "f" if self._content.is_floating_point() else "c" if self._content.is_complex() else "i"
        else:
            self._content = np.array(content)
            self.dtype_kind = self._content.dtype.kind
        self.shape = tuple(self._content.shape)
        self.num_bytes = self._content.nbytes
        self.dtype = str(self._content.dtype).removeprefix("torch.")

    def values(self) -> Array:
        """Wait for the copy, and return it.

        Raises:
            RuntimeError: the GPU reports an error.
        """
        if self._event is not None and isinstance(self._content, Tensor):
            try:
                self._event.synchronize()
            except RuntimeError as error:
                retain_if_gpu_lost(error, self)
                raise
            self._event = None
            # free the page-locked memory at once: encoding takes long enough for the GPU to be lost meanwhile
            self._content = self._content.clone()
        return self._content.numpy() if isinstance(self._content, Tensor) else self._content

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.dtype in (torch.bfloat16, torch.float16):
            # NumPy has no bfloat16
            tensor = tensor.float()
        if tensor.device.type != "cuda":
            return tensor.cpu().clone(memory_format=torch.contiguous_format)
        host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host_copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._event.record(torch.cuda.current_stream(tensor.device))
        return host_copy


IMAGE_CHANNELS = (1, 3, 4)
_GAP = 2
"""Pixels between the images of a grid."""
MOST_CHANNELS = 16
"""Channels of a sound; more are a shape in the wrong order."""


@dataclass(frozen=True, slots=True)
class CapturedMedium:
    """A copied medium, which later changes to the original don't affect.

    Attributes:
        kind: of the medium.
        num_bytes: its size in memory until it is encoded.
        encode: waits for the copy from the device, if there is one, and returns the content of the medium's file.
    """

    kind: MediumKind
    num_bytes: int
    encode: Callable[[], bytes]


def capture(where: str, kind: MediumKind, content: Any, options: Mapping[str, Any]) -> CapturedMedium:
    """Check and copy a medium, without waiting for the device.

    Args:
        where: the method, for messages.
        kind: of the medium.
        content: as `TaskLog` takes it.
        options: as `TaskLog` takes them.

    Raises:
        TaskError: it isn't of the kind.
    """
    try:
        return KINDS[kind].capture(content, **options)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None


def _copied(content: Any) -> HostArray:
    if isinstance(content, Tensor):
        return HostArray(content)
    try:
        return HostArray(content)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TaskError(
            f"expected a tensor, or what numpy.asarray takes, found a {type(content).__name__} ({error})"
        ) from None


def _image(image: Any) -> CapturedMedium:
    copy = _copied(image)
    if not _has_image_shape(copy.shape):
        raise TaskError(
            "expected the shape [H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 channels, or a batch of such images, "
            f"found {list(copy.shape)}"
        )
    if copy.dtype_kind != "f" and copy.dtype not in ("uint8", "bool"):
        raise TaskError(f"expected uint8, bool or floats from 0 to 1, found {copy.dtype}: convert it")
    # Import Pillow before the encoding thread needs it: a loading process that is forked during its import, and imports
    # it as well, would wait forever. Not at the top, as it takes 40 ms with its formats (`preinit`).
    from PIL import Image

    Image.preinit()
    return CapturedMedium("image", copy.num_bytes, lambda: encode_png(copy.values()))


def _has_image_shape(shape: tuple[int, ...]) -> bool:
    if 0 in shape:
        return False
    return len(shape) == 2 or (len(shape) in (3, 4) and (shape[-3] in IMAGE_CHANNELS or shape[-1] in IMAGE_CHANNELS))


def encode_png(values: Array) -> bytes:
    """Encode an image, or a batch of them as a grid.

    Args:
        values: of shape [H, W], [C, H, W] or [H, W, C] with C of 1, 3 or 4, or a batch of the latter two; uint8, bool,
            or floats, which are clipped to [0, 1].
    """
    from PIL import Image

    if values.ndim == 2:
        values = values[None]
    if values.shape[-3] in IMAGE_CHANNELS:
        values = np.moveaxis(values, -3, -1)
    grid = _grid(_pixels(values))
    encoded = io.BytesIO()
    # Pillow expects grey images without a channel dimension
    Image.fromarray(grid[..., 0] if grid.shape[-1] == 1 else grid).save(encoded, format="png")
    return encoded.getvalue()


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
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    grid = np.zeros((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), np.uint8)
    for index, image in enumerate(pixels):
        top, left = index // columns * (height + _GAP), index % columns * (width + _GAP)
        grid[top : top + height, left : left + width] = image
    return grid


def _figure(figure: Any) -> CapturedMedium:
    if not callable(getattr(figure, "savefig", None)):
        raise TaskError(f"expected a figure with a method savefig, found a {type(figure).__name__}")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    data = drawn.getvalue()
    return CapturedMedium("figure", len(data), lambda: data)


def _text(text: Any) -> CapturedMedium:
    if not isinstance(text, str):
        raise TaskError(f"expected a string, found a {type(text).__name__}")
    data = text.encode(errors="replace")
    return CapturedMedium("text", len(data), lambda: data)


def _histogram(values: Any, *, bins: int) -> CapturedMedium:
    copy = _copied(values)
    if copy.dtype_kind not in "biuf":
        raise TaskError(f"expected real numbers, found {copy.dtype}")
    if not isinstance(bins, int) or bins < 1:
        raise TaskError(f"expected a positive number of bins, found {bins!r}")
    return CapturedMedium("histogram", copy.num_bytes, lambda: _encode_histogram(copy.values(), bins))


def _encode_histogram(values: Array, bins: int) -> bytes:
    flat = values.astype(np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    with np.errstate(over="ignore", invalid="ignore"):
        counts, edges = _bin(flat, bins)
        sums = {"sum": float(flat.sum()), "sum_squares": float(np.square(flat).sum())}
    record = {
        "counts": counts,
        "edges": edges,
        # JSON has no infinity
        **{name: value if math.isfinite(value) else None for name, value in sums.items()},
        "left_out": values.size - flat.size,
    }
    return json.dumps(record, allow_nan=False).encode()


def _bin(flat: Array, bins: int) -> tuple[list[int], list[float]]:
    if not flat.size:
        return [], []
    low, high = float(flat.min()), float(flat.max())
    margin = 0.5 * (low == high)  # as np.histogram
    edges = np.linspace(low - margin, high + margin, bins + 1)
    if not np.all(np.diff(edges) > 0):
        # the range has no such number of different edges, or is too wide; np.histogram checks that since NumPy 2.2
        return [flat.size], [low, high]
    counts, edges = np.histogram(flat, bins)
    return counts.tolist(), edges.tolist()


def _audio(audio: Any, *, sample_rate: int) -> CapturedMedium:
    copy = _copied(audio)
    if len(copy.shape) not in (1, 2) or 0 in copy.shape or (len(copy.shape) == 2 and copy.shape[0] > MOST_CHANNELS):
        raise TaskError(f"expected the shape [samples] or [channels, samples], found {list(copy.shape)}")
    if copy.dtype_kind != "f" and copy.dtype != "int16":
        raise TaskError(f"expected int16 or floats from -1 to 1, found {copy.dtype}: convert it")
    if not isinstance(sample_rate, int) or sample_rate < 1:
        raise TaskError(f"expected a sample_rate in Hz, a positive integer, found {sample_rate!r}")
    return CapturedMedium("audio", copy.num_bytes, lambda: _encode_wav(copy.values(), sample_rate))


def _encode_wav(values: Array, sample_rate: int) -> bytes:
    samples = np.atleast_2d(values)
    if samples.dtype != np.int16:
        samples = np.round(np.clip(np.nan_to_num(samples), -1, 1) * 32767)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        # the channels' samples alternate, little-endian
        file.writeframes(samples.T.astype("<i2").tobytes())
    return buffer.getvalue()


def _table(rows: Iterable[Sequence[Any]], *, columns: Sequence[str]) -> CapturedMedium:
    titles = [str(title) for title in _items(columns, "columns, a list or tuple of titles")]
    checked_rows = []
    for number, values in enumerate(_items(rows, "rows, each a list or tuple of values")):
        row = [_cell(value) for value in _items(values, "a list or tuple of values", f" in row {number}")]
        checked_rows.append(row)
        if len(row) != len(titles):
            raise TaskError(f"expected {len(titles)} values per row, found {len(row)} in row {number}")
    return CapturedMedium(
        "table", 64 * len(titles) * (len(checked_rows) + 1), lambda: _encode_table(titles, checked_rows)
    )


def _items(values: Any, expected: str, where: str = "") -> Iterator[Any]:
    # a string's characters and a mapping's keys are hardly meant
    if not isinstance(values, str | bytes | Mapping):
        with suppress(TypeError):
            return iter(values)
    raise TaskError(f"expected {expected}, found a {type(values).__name__}{where}")


def _cell(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise TaskError(f"expected a tensor with one element in a row, found the shape {list(value.shape)}")
        return HostArray(value.reshape(()))
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return str(value)


def _encode_table(columns: list[str], rows: list[list[Any]]) -> bytes:
    """Encode as pandas reads it with ``orient="split"``."""
    return json.dumps({"columns": columns, "data": [[_plain(value) for value in row] for row in rows]}).encode()


def _plain(cell: Any) -> Any:
    value = cell.values().item() if isinstance(cell, HostArray) else cell
    # JSON has no NaN, no infinity and no complex numbers
    is_json = not isinstance(value, complex) and (not isinstance(value, float) or math.isfinite(value))
    return value if is_json else str(value)


class MediumHandler(NamedTuple):
    """Treatment of a kind of media.

    Attributes:
        suffix: of its files.
        capture: checks and copies a medium of this kind.
    """

    suffix: str
    capture: Callable[..., CapturedMedium]


KINDS: Mapping[MediumKind, MediumHandler] = {
    "image": MediumHandler("png", _image),
    "figure": MediumHandler("png", _figure),
    "text": MediumHandler("txt", _text),
    "histogram": MediumHandler("json", _histogram),
    "audio": MediumHandler("wav", _audio),
    "table": MediumHandler("json", _table),
}
