from __future__ import annotations

import io
import itertools
import math
import random
import subprocess
import sys

import pytest

from hpctrain.metrics.tensorboard import TensorBoardSink, event_files, frame, make_event_file, masked_crc32c


def read(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


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
    times = iter([1763.0, 1763.0, 1763.05, 1763.06, 1763.2, 1763.01])
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
from hpctrain.metrics.tensorboard import TensorBoardSink

sink = TensorBoardSink(Path(sys.argv[1]), 0)
assert not [name for name in sys.modules if name.startswith(("tensorboard", "google", "torch"))]
sink.log(1, {"train/loss": 1.0})
sink.close()
print(sorted({"torch", "tensorboard.compat.tensorflow_stub", "tensorboard.summary"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_frames_are_those_of_tensorboards_writer():
    from tensorboard.summary.writer.record_writer import RecordWriter

    generator = random.Random(5)
    for size in (0, 1, 7, 300):
        data = generator.randbytes(size)
        expected = io.BytesIO()
        RecordWriter(expected).write(data)
        assert frame(data) == expected.getvalue()


def test_checksum_of_the_rfc():
    unmasked = (masked_crc32c(bytes(32)) - 0xA282EAD8) & 0xFFFFFFFF
    assert ((unmasked << 15) | (unmasked >> 17)) & 0xFFFFFFFF == 0x8A9136AA  # RFC 3720, B.4: 32 bytes of zeroes


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
