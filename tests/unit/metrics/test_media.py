from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.errors import TaskError
from hpctrain.files import read_json_lines
from hpctrain.metrics.media import capture
from hpctrain.metrics.media_files import MediaFiles, MediaWriter, Medium, file_name


def encoded(kind, content, **options):
    return capture("T.log", kind, content, options).encode()


def decoded(png):
    """Pixels of an image, [H, W], or [H, W, C] with more channels than one."""
    with Image.open(io.BytesIO(png), formats=["png"]) as image:
        return np.asarray(image)


@pytest.mark.parametrize(
    ("shape", "found"),
    [((5, 7), (5, 7)), ((3, 5, 7), (5, 7, 3)), ((5, 7, 4), (5, 7, 4)), ((1, 3, 5, 7), (5, 7, 3))],
)
def test_a_picture_has_its_pixels_whatever_the_order_of_its_dimensions(shape, found):
    values = torch.rand(shape)
    pixels = decoded(encoded("image", values))
    assert pixels.shape == found
    channels_last = values if len(shape) == 2 else values.reshape(shape[-3:])
    if channels_last.shape[0] == 3:
        channels_last = channels_last.permute(1, 2, 0)
    assert np.abs(pixels / 255 - channels_last.numpy()).max() <= 0.5 / 255 + 1e-6


def test_values_beyond_the_range_are_clipped_and_bytes_stay():
    odd = torch.tensor([[-1.0, 2.0, float("nan"), float("inf")]])
    assert decoded(encoded("image", odd)).ravel().tolist() == [0, 255, 0, 255]
    whole = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert decoded(encoded("image", whole)).ravel().tolist() == whole.ravel().tolist()
    assert decoded(encoded("image", torch.tensor([[True, False]]))).ravel().tolist() == [255, 0]
    assert decoded(encoded("image", torch.ones(2, 2, dtype=torch.bfloat16))).min() == 255


def test_a_batch_becomes_a_grid():
    batch = torch.stack([torch.full((1, 4, 5), number / 255) for number in (10, 20, 30)])
    grid = decoded(encoded("image", batch))
    assert grid.shape == (2 * 4 + 2, 2 * 5 + 2)
    assert (grid[0, 0], grid[0, 7], grid[6, 0], grid[6, 7], grid[4, 0]) == (10, 20, 30, 0, 0)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_a_picture_has_the_very_bytes_that_were_logged_in_the_colours_of_its_channels(channels, mode):
    values = np.random.default_rng(0).integers(0, 256, (6, 9, channels), np.uint8)
    png = encoded("image", values)
    assert Image.open(io.BytesIO(png)).mode == mode
    assert np.array_equal(decoded(png).reshape(values.shape), values)


@pytest.mark.nightly  # imports torch
def test_pillow_is_there_before_the_thread_that_encodes_needs_it():
    """A loading process that is forked while another thread imports Pillow can't import it."""
    program = """
import sys
import torch
from hpctrain.metrics.media import capture

assert "PIL" not in sys.modules
image = capture("T.log", "image", torch.zeros(2, 2), {})
before = set(sys.modules)
image.encode()
print(sorted(name for name in set(sys.modules) - before if name.startswith("PIL")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_nothing_that_happens_afterwards_changes_a_medium():
    tensor, array = torch.zeros(2, 2), np.zeros((2, 2))
    kept = [capture("T.log", "image", content, {}) for content in (tensor, array)]
    tensor.fill_(1)
    array.fill(1)
    assert [decoded(captured.encode()).max() for captured in kept] == [0, 0]


def test_a_histogram_counts_what_is_finite():
    record = json.loads(encoded("histogram", torch.tensor([0.0, 1.0, 1.0, 4.0, float("nan")]), bins=4))
    assert (record["counts"], record["edges"], record["left_out"]) == ([1, 2, 0, 1], [0.0, 1.0, 2.0, 3.0, 4.0], 1)
    assert (record["sum"], record["sum_squares"]) == (6.0, 18.0)
    assert json.loads(encoded("histogram", torch.full((3,), float("inf")), bins=4))["counts"] == []


@pytest.mark.parametrize(
    ("values", "counts", "sums"),
    [
        ([1.0, 1 + 2.3e-16], [2], (2.0, 2 + 4.5e-16)),
        ([-1.7e308, 1.7e308], [2], (0.0, None)),
        ([1e300, 2e300], [1, 0, 0, 1], (3e300, None)),
        ([1.7e308, 1.7e308], [2], (None, None)),
        ([1e300], [1], (1e300, None)),
    ],
)
def test_a_histogram_of_any_finite_numbers_is_json(values, counts, sums):
    def fail(constant):
        raise AssertionError(constant)

    record = json.loads(encoded("histogram", np.array(values), bins=4), parse_constant=fail)
    assert (record["counts"], (record["sum"], record["sum_squares"])) == (counts, sums)
    assert (record["edges"][0], record["edges"][-1]) == (min(values), max(values))
    assert len(record["edges"]) == len(counts) + 1


def test_a_sound_is_a_wav_file():
    channels = torch.tensor([[0.0, 1.0, -2.0], [0.5, 0.0, 0.0]])
    with wave.open(io.BytesIO(encoded("audio", channels, sample_rate=8000))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 3)
        samples = np.frombuffer(file.readframes(3), "<i2").reshape(3, 2)
    assert samples.tolist() == [[0, 16384], [32767, 0], [-32767, 0]]


def test_a_table_is_one_for_pandas():
    rows = [[1, torch.tensor(2.5)], ["x", None], (np.float64("nan"), True), [torch.tensor(1j), torch.tensor(3)]]
    assert json.loads(encoded("table", rows, columns=["a", "b"])) == {
        "columns": ["a", "b"],
        "data": [[1, 2.5], ["x", None], ["nan", True], ["1j", 3]],
    }


def test_a_figure_is_drawn_at_once():
    class Figure:
        text = b"now"

        def savefig(self, file, **options):
            file.write(self.text + options["format"].encode())

    figure = Figure()
    captured = capture("T.log", "figure", figure, {})
    figure.text = b"later"
    assert captured.encode() == b"nowpng"


@pytest.mark.parametrize(
    ("kind", "content", "options", "problem"),
    [
        ("image", torch.ones(5), {}, r"expected the shape .* found \[5\]"),
        ("image", torch.ones(7, 8, 9), {}, r"found \[7, 8, 9\]"),
        ("image", torch.ones(0, 8), {}, r"found \[0, 8\]"),
        ("image", torch.ones(8, 8, dtype=torch.int64), {}, "expected uint8, bool or floats from 0 to 1, found int64"),
        ("text", 7, {}, "expected a string, found a int"),
        ("histogram", torch.ones(3, dtype=torch.complex64), {"bins": 3}, "expected real numbers"),
        ("histogram", ["a"], {"bins": 3}, "expected real numbers"),
        ("image", [[1.0], [1.0, 2.0]], {}, "expected a tensor, or what numpy.asarray takes, found a list"),
        ("histogram", [[1.0], [1.0, 2.0]], {"bins": 3}, "expected a tensor, or what numpy.asarray takes, found a list"),
        ("histogram", [torch.ones(1, requires_grad=True)], {"bins": 3}, "expected a tensor, or what .* found a list"),
        (
            "histogram",
            np.array(["2026"], "datetime64[D]"),
            {"bins": 3},
            r"expected real numbers, found datetime64\[D\]",
        ),
        ("histogram", [b"a"], {"bins": 3}, r"expected real numbers, found \|S1"),
        ("audio", [[1.0], [1.0, 2.0]], {"sample_rate": 8000}, "expected a tensor, or what .* found a list"),
        ("table", 5, {"columns": ["a"]}, "expected rows, each a list or tuple of values, found a int"),
        ("table", [5], {"columns": ["a"]}, "expected a list or tuple of values, found a int in row 0"),
        ("table", ["a"], {"columns": ["a"]}, "expected a list or tuple of values, found a str in row 0"),
        ("table", [{"a": 1}], {"columns": ["a"]}, "expected a list or tuple of values, found a dict in row 0"),
        ("table", [[1]], {"columns": "a"}, "expected columns, a list or tuple of titles, found a str"),
        ("histogram", [1.0], {"bins": 0}, "positive number of bins, found 0"),
        ("figure", 7, {}, "expected a figure with a method savefig, found a int"),
        ("audio", torch.ones(100, 2), {"sample_rate": 8000}, r"\[channels, samples\], found \[100, 2\]"),
        ("audio", torch.ones(9, dtype=torch.int64), {"sample_rate": 8000}, "expected int16 or floats"),
        ("audio", torch.ones(9), {"sample_rate": 8e3}, "expected a sample_rate in Hz"),
        ("table", [[1], [1, 2]], {"columns": ["a"]}, "expected 1 values per row, found 2 in row 1"),
        ("table", [[torch.ones(2)]], {"columns": ["a"]}, "one element in a row"),
    ],
)
def test_what_is_refused(kind, content, options, problem):
    with pytest.raises(TaskError, match=rf"^T\.log: .*{problem}"):
        capture("T.log", kind, content, options)


def medium(step, name="train/a", data=b"data", kind="text"):
    return Medium(step, 5.0, name, kind, data)


@pytest.fixture
def files_at(tmp_path):
    def build(step=0, **options):
        return MediaFiles(tmp_path / "media", tmp_path / "media.jsonl", step, **options)

    return build


def test_a_medium_is_a_file_and_a_record(files_at, tmp_path):
    files = files_at()
    files.write(medium(20))
    files.close()
    assert list(read_json_lines(tmp_path / "media.jsonl")) == [
        {"step": 20, "time": 5.0, "name": "train/a", "kind": "text", "file": "media/train/a_00000020.txt"}
    ]
    assert (tmp_path / "media/train/a_00000020.txt").read_bytes() == b"data"


def test_without_media_there_is_an_empty_file(files_at, tmp_path):
    files_at().close()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("media.jsonl", b"")]


@pytest.mark.parametrize("earlier", [False, True])
def test_the_first_medium_of_a_superseded_attempt_isnt_recorded(files_at, tmp_path, earlier):
    if earlier:
        before = files_at()
        before.write(medium(5))
        before.close()
    superseded, newer = files_at(5), files_at(5)
    newer.write(medium(10))
    superseded.write(medium(20))
    superseded.close()
    newer.close()
    steps = [record["step"] for record in read_json_lines(tmp_path / "media.jsonl")]
    assert steps == ([5, 10] if earlier else [10])


def test_a_resume_drops_later_records_with_their_files_and_a_repeated_evaluation(files_at, tmp_path):
    first = files_at()
    for step in (10, 20, 30):
        for name in ("train/a", "eval/a"):
            first.write(medium(step, name))
    first.close()
    (tmp_path / "media/train/.tmp-left-over").touch()
    files_at(20).close()
    assert [(record["step"], record["name"]) for record in read_json_lines(tmp_path / "media.jsonl")] == [
        (10, "train/a"),
        (10, "eval/a"),
        (20, "train/a"),
        (20, "eval/a"),
    ]
    files_at(20, evaluation_due=True).close()
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("media/*/*"))
    assert found == [
        f"media/{name}" for name in ("eval/a_00000010.txt", "train/a_00000010.txt", "train/a_00000020.txt")
    ]


def test_a_record_never_makes_a_resume_remove_another_file(files_at, tmp_path):
    (tmp_path / "precious").touch()
    line = {"step": 9, "time": 1.0, "name": "train/a", "kind": "text", "file": "../precious"}
    (tmp_path / "media.jsonl").write_text(json.dumps(line) + '\n{"step": 9, "name": 7, "kind": "../../precious"}\n')
    files_at(5).close()
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "media.jsonl").read_bytes() == b""


def test_names_of_files_are_safe_and_different():
    names = ["train/a", "train/a/b", "train/a%2Fb", "train/..", "train/ä b", "train/" + "ß" * 100, "train/" + "ß" * 99]
    found = [file_name(name, 7, "image") for name in names]
    assert len({*found}) == len(names)
    assert all(name.count("/") == 1 and len(name) < 250 for name in found)
    assert file_name("../a", 7, "text") == "%2E%2E/a_00000007.txt"
    assert found[3] == "train/.._00000007.png"


def test_media_wait_for_a_disk_that_fails_and_keep_their_order(files_at, tmp_path, caplog):
    files = files_at()
    (tmp_path / "media").touch()
    files.write(medium(1))
    files.write(medium(2))
    assert len(caplog.records) == 1
    assert "media wait in memory" in caplog.records[0].message
    (tmp_path / "media").unlink()
    files.sync()
    files.close()
    assert [record["step"] for record in read_json_lines(tmp_path / "media.jsonl")] == [1, 2]
    assert "can be written again" in caplog.records[1].message


def test_memory_stays_bounded_while_the_disk_fails(files_at, tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.metrics.media_files.MAX_WAITING_BYTES", 6)
    files = files_at()
    (tmp_path / "media").touch()
    for step in (1, 2):
        files.write(medium(step))
    (tmp_path / "media").unlink()
    files.close()
    assert [record["step"] for record in read_json_lines(tmp_path / "media.jsonl")] == [1]


def test_a_medium_beyond_the_bound_is_written_if_none_waits(files_at, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hpctrain.metrics.media_files.MAX_WAITING_BYTES", 6)
    files = files_at()
    files.write(medium(1, data=b"longer than the bound"))
    (tmp_path / "media").rename(tmp_path / "away")
    (tmp_path / "media").touch()
    for step in (2, 3, 4):
        files.write(medium(step))
    dropped = [record.message for record in caplog.records if "dropped" in record.message]
    assert dropped == ["too many media wait in memory: train/a of step 3 is dropped, and perhaps later ones"]
    (tmp_path / "media").unlink()
    files.write(medium(5, data=b"longer than the bound"))
    files.close()
    assert [record["step"] for record in read_json_lines(tmp_path / "media.jsonl")] == [1, 2, 5]


class Slow:
    """A capture that is encoded when it is allowed to."""

    kind, num_bytes = "text", 10

    def __init__(self):
        self.allowed = threading.Event()

    def encode(self):
        assert self.allowed.wait(10)
        return b"slow"


def test_each_flush_writes_media_that_wait_for_the_disk(files_at, tmp_path):
    (tmp_path / "media").touch()
    writer = MediaWriter(files_at())
    writer.put(1, "train/a", capture("T.log", "text", "data", {}))
    writer.flush()
    (tmp_path / "media").unlink()
    writer.flush()
    assert (tmp_path / "media/train/a_00000001.txt").read_bytes() == b"data"
    writer.close()


def test_a_flush_waits_for_all_media_and_a_call_for_none(files_at, tmp_path):
    received = []
    writer = MediaWriter(files_at(), [lambda medium: received.append(medium.step)])
    slow = Slow()
    writer.put(1, "train/a", slow)
    writer.put(2, "train/a", capture("T.log", "text", "two", {}))
    assert received == []
    slow.allowed.set()
    writer.flush()
    assert received == [1, 2]
    assert len(list(read_json_lines(tmp_path / "media.jsonl"))) == 2
    writer.put(3, "train/a", capture("T.log", "text", "three", {}))
    writer.close()
    assert received == [1, 2, 3]


@pytest.mark.parametrize(("bound", "value"), [("MAX_QUEUED_BYTES", 15), ("MAX_QUEUED", 1)])
def test_the_queue_is_bounded(files_at, monkeypatch, bound, value):
    monkeypatch.setattr(f"hpctrain.metrics.media_files.{bound}", value)
    writer, slow = MediaWriter(files_at()), Slow()
    writer.put(1, "train/a", slow)
    waits = threading.Thread(target=writer.put, args=(2, "train/a", capture("T.log", "text", "longer", {})))
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    slow.allowed.set()
    waits.join(10)
    writer.close()


def test_a_medium_that_cannot_be_encoded_is_a_warning(files_at, tmp_path, caplog):
    class Bad(Slow):
        def encode(self):
            raise ValueError("odd")

    writer = MediaWriter(files_at())
    writer.put(1, "train/a", Bad())
    writer.put(2, "train/b", capture("T.log", "text", "two", {}))
    writer.close()
    assert caplog.records[0].message == "train/a of step 1 could not be written"
    assert [record["step"] for record in read_json_lines(tmp_path / "media.jsonl")] == [2]
