from __future__ import annotations

import io
import random

import pytest

from hpctrain.metrics.event_file import event_files, frame, make_event_file, masked_crc32c


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
