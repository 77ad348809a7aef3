from __future__ import annotations

import io
import itertools
import math
import random
import subprocess
import sys

import pytest
import torch

from hpctrain.metrics.media import capture, encode_png
from hpctrain.metrics.media_files import Medium
from hpctrain.metrics.tensorboard import TensorBoardSink, event_files, frame, make_event_file


def read(directory):
    """Scalars as TensorBoard's library reads them, and, which has to be the same, its server (--load_fast=false)."""
    from tensorboard.util.tensor_util import make_ndarray

    accumulator, server = accumulated(directory), served(directory)
    found = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }
    shown = {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in server.Tensors(tag)]
        for tag in server.Tags()["tensors"]
    }
    assert shown == found
    return found


def accumulated(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def served(directory):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_what_was_logged(tmp_path):
    sink = TensorBoardSink(tmp_path, 0, clock=lambda: 1763.0)
    sink.log(10, {"train/loss": 0.5, "train/lr": 0.25})
    sink.log(20, {"train/loss": math.inf, "eval/accuracy": 0.75})
    sink.close()
    assert read(tmp_path) == {
        "train/loss": [(10, 0.5), (20, math.inf)],
        "train/lr": [(10, 0.25)],
        "eval/accuracy": [(20, 0.75)],
    }


def test_no_close_is_needed_to_read_a_killed_run(tmp_path):
    sink = TensorBoardSink(tmp_path, 0)
    sink.log(10, {"train/loss": 0.5})
    assert read(tmp_path) == {"train/loss": [(10, 0.5)]}
    sink.close()


def test_the_last_record_is_there_however_fast_they_follow(tmp_path):
    sink = TensorBoardSink(tmp_path, 0, clock=itertools.count(1763, 0.01).__next__)
    for step in range(1, 6):
        sink.log(step, {"train/loss": float(step)})
    sink.log(5, {"eval/loss": 5.5})
    sink.flush()  # before a checkpoint, from which a resume continues
    assert read(tmp_path) == {"train/loss": [(1, 1.0), (5, 5.0)], "eval/loss": [(5, 5.5)]}
    for step in range(6, 8):
        sink.log(step, {"train/loss": float(step)})
    sink.close()
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (5, 5.0), (7, 7.0)]


def test_a_curve_never_doubles_back(tmp_path):
    for resume_step, logged in ((0, (10, 20, 30)), (20, (30, 40, 50)), (40, (50,))):
        sink = TensorBoardSink(tmp_path, resume_step, clock=itertools.count(1763).__next__)
        for step in logged:
            sink.log(step, {"train/loss": step + resume_step / 1024})
        sink.close()
    assert len(event_files(tmp_path)) == 3
    assert [step for step, _ in read(tmp_path)["train/loss"]] == [10, 20, 30, 40, 50]
    assert dict(read(tmp_path)["train/loss"])[30] == pytest.approx(30 + 20 / 1024)
    assert dict(read(tmp_path)["train/loss"])[50] == pytest.approx(50 + 40 / 1024)


def test_a_start_from_nothing_purges_everything(tmp_path):
    for _ in range(2):
        sink = TensorBoardSink(tmp_path, 0)
        sink.log(5, {"eval/loss": 2.0})
        sink.log(10, {"eval/loss": 1.0})
        sink.close()
    assert read(tmp_path) == {"eval/loss": [(5, 2.0), (10, 1.0)]}


def test_records_in_quick_succession_are_left_out_except_evaluations(tmp_path):
    times = iter([1763.0, 1763.0, 1763.0, 1763.05, 1763.06, 1763.2, 1763.01])
    sink = TensorBoardSink(tmp_path, 0, clock=lambda: next(times))
    for step, name in ((1, "train/loss"), (2, "train/loss"), (3, "eval/loss"), (4, "train/loss")):
        sink.log(step, {name: 1.0})
    sink.log(5, {"train/loss": 1.0})  # the clock was set back
    sink.close()
    assert read(tmp_path) == {"train/loss": [(1, 1.0), (4, 1.0), (5, 1.0)], "eval/loss": [(3, 1.0)]}


def test_a_folder_that_cannot_be_made_causes_one_warning(tmp_path, caplog):
    taken = tmp_path / "tensorboard"
    taken.touch()
    sink = TensorBoardSink(taken, 0, clock=itertools.count(1763).__next__)
    sink.log(1, {"train/loss": 1.0})
    sink.log(2, {"train/loss": 1.0})
    assert len(caplog.records) == 1
    taken.unlink()
    sink.log(3, {"train/loss": 0.5})
    sink.close()
    assert read(taken) == {"train/loss": [(3, 0.5)]}


def test_nothing_heavy_is_imported_and_nothing_at_all_before_the_first_record(tmp_path):
    program = """
import sys
from pathlib import Path
from types import SimpleNamespace
from hpctrain.metrics.tensorboard import TensorBoardSink

sink = TensorBoardSink(Path(sys.argv[1]), 0)
assert not [name for name in sys.modules if name.startswith(("tensorboard", "google.", "torch"))]
sink.log(1, {"train/loss": 1.0})
sink.media(SimpleNamespace(kind="text", name="train/note", data=b"good", step=1, time=0.0))
sink.close()
print(sorted({"torch", "fsspec", "tensorboard.compat.tensorflow_stub", "tensorboard.summary"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_frames_are_those_of_tensorboards_writer():
    from tensorboard.summary.writer.record_writer import RecordWriter

    generator = random.Random(5)
    for size in (0, 1, 7, 300, 70_001):
        data = generator.randbytes(size)
        expected = io.BytesIO()
        RecordWriter(expected).write(data)
        assert frame(data) == expected.getvalue()


def test_a_new_file_comes_last_even_after_a_clock_that_was_ahead(tmp_path):
    directory = tmp_path / "tensorboard"
    directory.mkdir()
    (directory / "events.out.tfevents.4000000000.fast-clock.1").touch()
    (directory / "events.out.tfevents.odd").touch()
    first = make_event_file(directory)
    second = make_event_file(directory)
    there = [path for path in event_files(directory) if path.name != "events.out.tfevents.odd"]
    assert there[1:] == [first, second]


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(OSError, match="taken"):
        make_event_file(tmp_path / "taken")


def test_media_are_read_back(tmp_path):
    sink = TensorBoardSink(tmp_path, 0)
    content = {
        "image": (torch.rand(3, 4, 5), {}),
        "audio": (torch.rand(2, 100), {"sample_rate": 8000}),
        "histogram": (torch.arange(8.0), {"bins": 4}),
        "text": ("some *text*", {}),
        "table": ([[1, "a|b"], [None, 2.5]], {"columns": ["x", "y"]}),
    }
    for kind, (value, options) in content.items():
        data = capture("T.log", kind, value, options).encode()
        sink.media(Medium(7, 1763.0, f"train/{kind}", kind, data))
    sink.close()
    found = accumulated(tmp_path)
    (image,) = found.Images("train/image")
    assert (image.step, image.width, image.height) == (7, 5, 4)
    (audio,) = found.Audio("train/audio")
    assert (audio.step, audio.sample_rate, audio.length_frames, audio.content_type) == (7, 8000, 100, "audio/wav")
    (histogram,) = found.Histograms("train/histogram")
    assert (histogram.histogram_value.min, histogram.histogram_value.max) == (0.0, 7.0)
    assert (histogram.histogram_value.num, [*histogram.histogram_value.bucket]) == (8.0, [2, 2, 2, 2])
    assert found.SummaryMetadata("train/text").plugin_data.plugin_name == "text"
    ((text,), (table,)) = (found.Tensors(f"train/{kind}") for kind in ("text", "table"))
    assert [*text.tensor_proto.string_val] == [b"some *text*"]
    assert [*table.tensor_proto.string_val] == [b"|x|y|\n|---|---|\n|1|a\\|b|\n||2.5|"]


def test_odd_media_are_written(tmp_path):
    sink = TensorBoardSink(tmp_path, 0)
    odd = {"histogram": ([1e300, 2e300], {"bins": 2}), "table": ([["\ud800"]], {"columns": ["x"]})}
    for kind, (value, options) in odd.items():
        sink.media(Medium(7, 1763.0, f"train/{kind}", kind, capture("T.log", kind, value, options).encode()))
    sink.close()
    found = accumulated(tmp_path)
    assert [*found.Histograms("train/histogram")[0].histogram_value.bucket] == [1, 1]
    assert [*found.Tensors("train/table")[0].tensor_proto.string_val] == [b"|x|\n|---|\n|?|"]


def test_a_resume_drops_later_media(tmp_path):
    for resume_step, steps in ((0, (10, 20, 30)), (20, (30, 40))):
        sink = TensorBoardSink(tmp_path, resume_step)
        for step in steps:
            sink.media(Medium(step, 1763.0, "eval/a", "text", b"a"))
            sink.media(Medium(step, 1763.0, "eval/b", "image", encode_png(torch.rand(2, 2).numpy())))
        sink.close()
    found = served(tmp_path)
    for tag in ("eval/a", "eval/b"):
        assert [event.step for event in found.Tensors(tag)] == [10, 20, 30, 40]


def test_the_page_of_hyperparameters_reads_a_sweep(tmp_path):
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    for number, lr in enumerate((0.1, 0.2)):
        chosen = {"optimizer.lr": lr, "task": "digits", "trainer.compile": False}
        for resume_step in (0, 10):
            directory = tmp_path / str(number) / "tensorboard"
            sink = TensorBoardSink(directory, resume_step, hyperparameters=chosen)
            sink.log(resume_step + 10, {"eval/loss": 5.0 - resume_step * lr})
            if resume_step:
                sink.complete()
            sink.close()
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    everything = context.experiment_from_metadata(
        RequestContext(), "", True, context.hparams_metadata(RequestContext(), ""), []
    )
    assert {info.name for info in everything.hparam_infos} == {"optimizer.lr", "task", "trainer.compile"}
    request = api_pb2.ListSessionGroupsRequest(
        col_params=[api_pb2.ColParams(hparam="optimizer.lr", order=api_pb2.ORDER_ASC)],
        start_index=0,
        slice_size=10,
        allowed_statuses=[api_pb2.STATUS_SUCCESS],
    )
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    found = [
        (
            group.hparams["optimizer.lr"].number_value,
            group.hparams["task"].string_value,
            {value.name.tag: value.value for value in group.metric_values},
        )
        for group in groups
    ]
    assert found == [(0.1, "digits", {"eval/loss": 4.0}), (0.2, "digits", {"eval/loss": 3.0})]
