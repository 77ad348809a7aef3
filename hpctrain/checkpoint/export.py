"""The process that writes a checkpoint's weights for `export`: `python -m hpctrain.checkpoint.export REQUEST`.

REQUEST is a JSON object: `checkpoint`, the directory of a verified checkpoint; `output`; `form`, one of `FORMS`;
`averaged`; `dtype`, one of `DTYPES` or null; and `max_bytes` of a file in a folder.

It prints JSON objects, one per line: while it writes, `written` and `total` bytes; at the end `files`, `tensors`,
`bytes`, `left_out` (names of what isn't a tensor), `infinite` (names of tensors that the type is too small for) and
`has_average`, or `error`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from hpctrain.checkpoint.host_memory import sharing_key
from hpctrain.checkpoint.read import LoadedCheckpoint, load
from hpctrain.checkpoint.stored_tensor import StoredTensor
from hpctrain.checkpoint.weight_stream import (
    WeightStream,
    publish_folder,
    write_folder,
    write_safetensors,
    write_torch_file,
)
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.files import fsync_directory, temporary_name
from hpctrain.phrases import listed
from hpctrain.run.file_system import explain

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMS = ("safetensors", "torch", "folder")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORT_S = 0.5
"""Seconds between reports of how much is written."""


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """Weights of a checkpoint that an export writes.

    Attributes:
        streams: by name; tied weights have the same one.
        left_out: names of extra state that isn't a tensor.
        versions: of the modules, by path; None if they weren't saved.
    """

    streams: dict[str, WeightStream]
    left_out: tuple[str, ...]
    versions: object


class Reporter:
    """Prints how much is written, every `REPORT_S` seconds and at the end.

    If the command that reads it has ended, a report fails, and so does the export, before anything has its name.

    Args:
        stream: to the command.
        total: bytes that will be written.
    """

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._total = total
        self._written_bytes = 0
        self._reported_at = time.monotonic()

    def add(self, count: int) -> None:
        """Count the bytes of a write."""
        self._written_bytes += count
        if time.monotonic() - self._reported_at >= REPORT_S or self._written_bytes == self._total:
            self._reported_at = time.monotonic()
            print_line(self._stream, {"written": self._written_bytes, "total": self._total})


def print_line(stream: TextIO, record: Mapping[str, Any]) -> None:
    """Print a JSON object."""
    stream.write(json.dumps(record) + "\n")
    stream.flush()


def weights_of(
    checkpoint: LoadedCheckpoint, *, averaged: bool = False, dtype: torch.dtype | None = None
) -> ExportedWeights:
    """Choose the weights of a checkpoint, without reading them.

    Args:
        checkpoint: the checkpoint.
        averaged: take the moving averages of the parameters that have one.
        dtype: of floating-point elements; None for the type in which they were saved.

    Raises:
        CheckpointError: it has no average, or one of other weights.
    """
    model: Mapping[str, Any] = checkpoint.model
    average = checkpoint.average if averaged else {}
    if averaged and not average:
        raise CheckpointError(
            f"{checkpoint.path} has no averaged weights: trainer.ema_decay was not set; leave out --ema for the weights"
        )
    if strange := average.keys() - model.keys():
        raise CheckpointError(f"{checkpoint.path} averages weights that its model lacks: {listed(sorted(strange))}")
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor | StoredTensor)}
    groups: dict[object, list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(_identity(value), []).append(name)
    streams: dict[str, WeightStream] = {}
    for names in groups.values():
        # an average has a tied weight under one of its names
        value = next((average[name] for name in names if name in average), tensors[names[0]])
        stored = value if isinstance(value, StoredTensor) else StoredTensor.of(value)
        streams |= dict.fromkeys(names, WeightStream(stored, dtype))
    return ExportedWeights(
        {name: streams[name] for name in tensors},
        tuple(name for name in model if name not in tensors),
        getattr(model, "_metadata", None),
    )


def _identity(value: Tensor | StoredTensor) -> object:
    # tensors without elements have no memory that they could share
    return sharing_key(value) if isinstance(value, Tensor) and value.numel() else id(value)


def write_weights(
    weights: ExportedWeights, output: Path, form: str, on_write: Callable[[int], None], *, max_bytes: int = 0
) -> int:
    """Write a file or a folder under a temporary name, make it durable, and give it its name.

    A file is replaced; in a folder, the weights are.

    Args:
        weights: to write.
        output: path of the file or folder.
        form: one of `FORMS`.
        on_write: called with the number of bytes after each write.
        max_bytes: of a file in a folder.

    Returns:
        The number of files of weights.

    Raises:
        CheckpointError: it can't be written; nothing is left.
    """
    try:
        with _temporary_folder(output) as folder:
            if form == "folder":
                write_folder(folder, weights.streams, max_bytes, on_write)
                count = len(list(folder.glob("*.safetensors")))
                publish_folder(folder, output)
                return count
            # torch takes the name of what is in its archive from the name of the file
            file = folder / output.name
            if form == "torch":
                write_torch_file(file, weights.streams, weights.versions, on_write)
            else:
                write_safetensors(file, weights.streams, on_write)
            file.replace(output)
            fsync_directory(output.parent)
            return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CheckpointError(f"{output} can't be written: {explain(error, output)}") from error


@contextlib.contextmanager
def _temporary_folder(output: Path) -> Iterator[Path]:
    """Make a folder next to the output, and remove what is left of it."""
    path = temporary_name(output)
    try:
        path.mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def export(request: Mapping[str, Any], stream: TextIO) -> dict[str, Any]:
    """Export, report how much is written, and return the last object to print; see the module.

    Raises:
        CheckpointError: the checkpoint can't be read, has no average, or the output can't be written.
    """
    checkpoint = load(Path(request["checkpoint"]), verified=True)
    weights = weights_of(checkpoint, averaged=request["averaged"], dtype=DTYPES.get(request["dtype"]))
    form: str = request["form"]
    # in a .pt file, tied weights are written once
    distinct = set(weights.streams.values())
    total = sum(weight.nbytes for weight in (distinct if form == "torch" else weights.streams.values()))
    reporter = Reporter(stream, total)
    files = write_weights(weights, Path(request["output"]), form, reporter.add, max_bytes=request["max_bytes"])
    return {
        "files": files,
        "tensors": len(weights.streams),
        "bytes": total,
        "left_out": list(weights.left_out),
        "infinite": [name for name, weight in weights.streams.items() if weight.overflows],
        "has_average": bool(checkpoint.average),
    }


def _stop(_number: int, _frame: object) -> None:
    # only once: a second signal must not interrupt the removal of what was written
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Export, and print the result."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    stream = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            summary = export(json.loads(arguments[0]), stream)
    except HpctrainError as error:
        summary = {"error": str(error)}
    except (KeyboardInterrupt, BrokenPipeError):
        # without Python's traceback: the command was interrupted, or has ended
        os._exit(1)
    print_line(stream, summary)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
