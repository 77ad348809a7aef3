"""Media in TensorBoard's events, as `torch.utils.tensorboard.SummaryWriter` writes them."""

from __future__ import annotations

import io
import json
import wave
from typing import Any

from hpctrain.metrics.media.files import Medium
from hpctrain.metrics.media.png import size_of


def add_medium(summary: Any, medium: Medium) -> None:
    """Add a medium to an event's summary.

    Args:
        summary: of the event.
        medium: with the content of its file.
    """
    if medium.kind in ("image", "figure"):
        width, height = size_of(medium.data)
        image = summary.value.add(tag=medium.name).image
        image.width = width
        image.height = height
        image.encoded_image_string = medium.data
    elif medium.kind == "audio":
        _add_audio(summary.value.add(tag=medium.name).audio, medium.data)
    elif medium.kind == "histogram":
        _add_histogram(summary.value.add(tag=medium.name).histo, json.loads(medium.data))
    elif medium.kind == "text":
        _add_text(summary.value.add(tag=medium.name), medium.data)
    else:
        _add_text(summary.value.add(tag=medium.name), markdown(json.loads(medium.data)).encode(errors="replace"))


def markdown(table: dict[str, Any]) -> str:
    """Return a table, as `media.captured` encodes it, in Markdown."""
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["data"]]
    return "\n".join("|" + "|".join(_in_cell(value) for value in row) + "|" for row in rows)


def _in_cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _add_audio(audio: Any, data: bytes) -> None:
    with wave.open(io.BytesIO(data)) as file:
        audio.sample_rate = file.getframerate()
        audio.num_channels = file.getnchannels()
        audio.length_frames = file.getnframes()
    audio.encoded_audio_string = data
    audio.content_type = "audio/wav"


def _add_histogram(histogram: Any, record: dict[str, Any]) -> None:
    counts, edges = record["counts"], record["edges"]
    histogram.num = sum(counts)
    for name in ("sum", "sum_squares"):
        # null is beyond what JSON has
        if record[name] is not None:
            setattr(histogram, name, record[name])
    if counts:
        histogram.min = edges[0]
        histogram.max = edges[-1]
        histogram.bucket_limit.extend(edges[1:])
        histogram.bucket.extend(counts)


def _add_text(value: Any, text: bytes) -> None:
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

    value.metadata.plugin_data.plugin_name = "text"
    value.metadata.plugin_data.content = TextPluginData(version=0).SerializeToString()
    value.tensor.dtype = 7  # DT_STRING
    value.tensor.tensor_shape.dim.add(size=1)
    value.tensor.string_val.append(text)
