from __future__ import annotations

import gzip
import io
import json
import logging
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.data import tar_dataset
from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.loader import TrainLoader
from hpctrain.data.order import ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.data.tar_dataset import TarDataset
from hpctrain.data.tar_index import index_of
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError


def write_tar(path, files, kind=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def saved(write, *arguments):
    content = io.BytesIO()
    write(content, *arguments)
    return content.getvalue()


def num_open():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def shards(tmp_path):
    """Three of 4, 3 and 5 samples, numbered through."""
    number = 0
    for shard, count in enumerate((4, 3, 5)):
        files = []
        for _ in range(count):
            files += [(f"{number:04d}.cls", str(number).encode()), (f"{number:04d}.txt", b"x" * (700 * number))]
            number += 1
        write_tar(tmp_path / f"s-{shard:02d}.tar", files)
    return tmp_path


def test_samples_are_numbered_through_the_shards(shards):
    data = TarDataset(shards / "s-*.tar", fields=("cls", "txt"))
    assert len(data) == 12
    assert [data[index][0] for index in range(12)] == list(range(12))
    assert [len(data[index][1]) for index in (0, 1, 11)] == [0, 700, 7700]
    assert data.key(5) == "0005"
    assert TarDataset(f"{shards}/s-{{00..01}}.tar").paths == (shards / "s-00.tar", shards / "s-01.tar")
    assert TarDataset([shards / "s-02.tar", shards / "s-00.tar"])[5]["__key__"] == "0000"
    with pytest.raises(IndexError):
        data[12]


def test_every_sample_once_at_any_world_size_and_number_of_workers(shards):
    def epoch(world_size, num_workers, start_step=0):
        found = [[] for _ in range(3 - start_step)]
        plan = BatchPlan(12, 4, 1, world_size, drop_last=False)
        for rank in range(world_size):
            data = TarDataset(shards / "s-*.tar", fields=("cls",))
            order = ShuffledOrder(12, 0)
            workers = Workers(num_workers)
            loader = iter(
                TrainLoader(BatchFetcher(data, 0), order, plan, rank=rank, start_step=start_step, workers=workers)
            )
            for step in found:
                for _ in range(plan.accumulation):
                    step.extend(next(loader).batch[0].tolist())
            loader.close()
        return [sorted(step) for step in found]

    straight = epoch(1, 0)
    assert sorted(number for step in straight for number in step) == list(range(12))
    assert epoch(2, 2) == epoch(4, 0) == straight
    assert epoch(2, 0, start_step=1) == straight[1:]


def test_files_are_decoded_by_their_extension(tmp_path):
    image = Image.new("RGB", (3, 2), (255, 0, 7))
    files = [
        ("./a/0.JPG", saved(image.save, "PNG")),
        ("./a/0.seg.png", saved(image.convert("L").save, "PNG")),
        ("./a/0.json", json.dumps({"kind": [1]}).encode()),
        ("./a/0.npy", saved(np.save, np.arange(3))),
        ("./a/0.pt", b""),
        ("./a/0.bin", b"\0\1"),
        ("./a/0.txt", "ä".encode()),
        ("__meta__/x.txt", b"ignored"),
        ("README", b"ignored"),
        ("b" * 150 + ".cls", b"3\n"),  # a long name, in a header of its own
    ]
    files[4] = ("./a/0.pt", saved(lambda file: torch.save({"w": torch.ones(2)}, file)))
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        data = TarDataset(write_tar(tmp_path / f"{kind}.tar", files, kind))
        assert len(data) == 2
        sample = data[0]
        assert sample["__key__"] == "./a/0"
        assert sample["jpg"].shape == sample["seg.png"].shape == (3, 2, 3)
        assert sample["jpg"][:, 0, 0].tolist() == [255, 0, 7]
        assert (sample["json"], sample["npy"].tolist(), sample["bin"]) == ({"kind": [1]}, [0, 1, 2], b"\0\1")
        assert (sample["pt"]["w"].tolist(), sample["txt"]) == ([1, 1], "ä")
        assert data[1] == {"__key__": "b" * 150, "cls": 3}


def test_fields_transform_and_decode_are_the_users(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("0.jpeg", b"j"), ("0.cls", b"4"), ("1.png", b"p"), ("1.cls", b"5")])
    data = TarDataset(path, fields=("cls", "png;jpeg"), decode=lambda name, data: (name, data), transform=list)
    assert data[0] == [("cls", b"4"), ("jpeg", b"j")]
    assert data[1][1] == ("png", b"p")
    with pytest.raises(TaskError, match=r"a\.tar: 0 has no \.png or \.gif, only jpeg, cls"):
        TarDataset(path, fields=("png;gif",))[0]
    with pytest.raises(TaskError, match=r"a\.tar: 0\.jpeg at byte 512 can't be decoded \(UnidentifiedImageError"):
        TarDataset(path, fields=("jpeg",))[0]


def indexed(caplog):
    """The files that were indexed, several at a time."""
    return sorted(line.rpartition("/")[2] for line in caplog.messages if line.startswith("indexing "))


def test_an_index_is_made_once_and_again_if_the_file_changes(shards, caplog):
    logging.getLogger("hpctrain").propagate = True
    with caplog.at_level(logging.INFO, "hpctrain.data"):
        TarDataset(shards / "s-*.tar")
        TarDataset(shards / "s-*.tar")
        assert indexed(caplog) == ["s-00.tar", "s-01.tar", "s-02.tar"], caplog.text
        caplog.clear()
        assert (shards / "s-00.tar.index").exists()
        (shards / "s-01.tar.index").write_bytes(b"from another world")
        write_tar(shards / "s-00.tar", [("9.cls", b"9")])
        assert len(TarDataset(shards / "s-*.tar")) == 9
        assert indexed(caplog) == ["s-00.tar", "s-01.tar"]
        assert "s-01.tar.index can't be used: " in caplog.text
    TarDataset(shards / "s-00.tar", index=shards / "indices")
    (made,) = (shards / "indices").iterdir()
    assert made.name.startswith("s-00.tar-")


def test_a_damaged_index_is_made_again(shards):
    TarDataset(shards / "s-00.tar")
    index = shards / "s-00.tar.index"
    content = bytearray(index.read_bytes())
    content[content.index(b"PK\1\2") + 10] = 99  # an unknown kind of compression, for zip
    index.write_bytes(content)
    assert len(TarDataset(shards / "s-00.tar")) == 4
    assert index.read_bytes() != content


def test_an_index_that_cannot_be_written_names_the_remedy(shards):
    (shards / "file").touch()
    with pytest.raises(TaskError, match=r"can't be written .*TarDataset\(index=FOLDER\)"):
        TarDataset(shards / "s-00.tar", index=shards / "file" / "folder")


def test_processes_share_nothing_but_the_files(shards, monkeypatch):
    monkeypatch.setattr(tar_dataset, "MAX_OPEN", 2)
    before = num_open()
    data = TarDataset(shards / "s-*.tar", fields=("cls",))
    assert [data[index][0] for index in (0, 5, 11, 1)] == [0, 5, 11, 1]
    assert num_open() == before + 2
    copied = pickle.loads(pickle.dumps(data))
    assert copied[6][0] == 6
    del data, copied
    assert num_open() == before


def broken(path: Path, how: str) -> Path:
    content = bytearray(path.read_bytes())
    if how == "header":
        content[2048:2560] = b"?" * 512
    elif how == "cut in a file":
        del content[2100:]
    elif how == "cut in a header":
        del content[1100:]
    elif how == "cut between files":
        del content[2048:]
    elif how == "made by cat":
        content *= 2
    elif how == "compressed":
        content = gzip.compress(content)
    elif how == "empty":
        content = b""
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("header", r"s\.tar is damaged or cut short at byte 2048 \("),
        ("cut in a file", r"s\.tar is damaged or cut short at byte \d+ \("),
        ("cut in a header", r"s\.tar is damaged or cut short at byte 1024 \("),
        ("cut between files", r"s\.tar is damaged or cut short at byte 2048 \(no end marker\)"),
        ("made by cat", r"s\.tar has more data after its end at byte 5120: .*tar --concatenate"),
        ("compressed", r"s\.tar is compressed, so it can't be read by position: decompress it"),
        ("empty", r"s\.tar is damaged or cut short at byte 0 \(empty file\)"),
    ],
)
def test_a_damaged_tar_file_is_named_with_the_place(tmp_path, how, message):
    path = write_tar(tmp_path / "s.tar", [(f"{name}.txt", b"x" * 200) for name in range(5)], tarfile.USTAR_FORMAT)
    with pytest.raises(TaskError, match=message):
        index_of(broken(path, how))
    assert not (tmp_path / "s.tar.index").exists()


def forged(path: Path, **headers: object) -> Path:
    """A tar file whose first header has other fields."""
    write_tar(path, [("0.txt", b"x" * 200), ("1.txt", b"y")], tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    member = tarfile.TarInfo("0.txt")
    member.size = 200
    for name, value in headers.items():
        setattr(member, name, value)
    header = member.tobuf(tarfile.PAX_FORMAT if member.pax_headers else tarfile.GNU_FORMAT)
    path.write_bytes(header + content[512:])
    return path


@pytest.mark.parametrize(
    "headers",
    [
        {"size": 2**70},
        {"size": 2**62},
        {"size": -(2**40)},
        {"pax_headers": {"size": "-1024"}},
        {"pax_headers": {"size": "9" * 400}},
        {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"}},
    ],
)
@pytest.mark.timeout(20)
def test_a_forged_header_is_damage(tmp_path, headers):
    with pytest.raises(TaskError, match=r"s\.tar (is damaged or cut short|can't be read)"):
        index_of(forged(tmp_path / "s.tar", **headers))
    assert not (tmp_path / "s.tar.index").exists()


def test_a_header_for_all_files_is_none_of_them(tmp_path):
    """As `git archive` writes it."""
    path = tmp_path / "s.tar"
    write_tar(path, [("0.txt", b"x"), ("1.txt", b"y")], tarfile.USTAR_FORMAT)
    path.write_bytes(tarfile.TarInfo.create_pax_global_header({"comment": "d" * 40}) + path.read_bytes())
    assert len(index_of(path)) == 2


def test_a_pipe_in_place_of_a_tar_file_or_of_an_index_is_not_waited_for(shards):
    os.mkfifo(shards / "pipe.tar")
    with pytest.raises(TaskError, match=r"pipe\.tar can't be read \(not a regular file\)"):
        index_of(shards / "pipe.tar")
    os.mkfifo(shards / "s-00.tar.index")
    assert len(index_of(shards / "s-00.tar")) == 4
    assert (shards / "s-00.tar.index").is_file()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sizes", np.array([2**62] * 8)),
        ("sizes", np.array([-1] * 8)),
        ("offsets", np.array([2**62] * 8)),
        ("offsets", np.zeros(7, np.int64)),
        ("firsts", np.array([0, 2, 4, 2**40, 8])),
        ("firsts", np.zeros(5, np.int64)),
        ("key_ends", np.array([4, 8, 12, 2**40])),
        ("kinds", np.full(8, 9, np.uint16)),
        ("kinds", np.zeros((8, 1), np.uint16)),
        ("keys", np.zeros(16, np.float32)),
        ("extensions", np.array([b"cls"])),
        ("state", np.zeros((0,), np.int64)),
    ],
)
def test_an_index_with_other_arrays_is_made_again(shards, name, value):
    path, index = shards / "s-00.tar", shards / "s-00.tar.index"
    right = index_of(path)
    with index.open("wb") as file:
        np.savez(file, **{field: getattr(right, field) for field in right.__slots__} | {name: value})
    again = index_of(path)
    assert all(np.array_equal(getattr(again, field), getattr(right, field)) for field in right.__slots__)


def test_an_index_that_would_fill_the_memory_is_made_again(shards):
    right = index_of(shards / "s-00.tar")
    arrays = {field: getattr(right, field) for field in right.__slots__} | {"keys": np.zeros(10**7, np.uint8)}
    with (shards / "s-00.tar.index").open("wb") as file:
        np.savez_compressed(file, **arrays)
    assert len(index_of(shards / "s-00.tar").keys) == len(right.keys)


def test_what_is_no_sample_is_said(tmp_path):
    with pytest.raises(TaskError, match=r"no tar file matches \S+none-\*\.tar"):
        TarDataset(tmp_path / "none-*.tar")
    with pytest.raises(TaskError, match=r"none\.tar can't be read \(No such file"):
        TarDataset(tmp_path / "none.tar")
    with pytest.raises(TaskError, match=r"a\.tar has no samples: expected files such as 000\.jpg"):
        TarDataset(write_tar(tmp_path / "a.tar", [("README", b"")]))
    with pytest.raises(TaskError, match=r"b\.tar has 1\.txt twice, again at byte 1024"):
        TarDataset(write_tar(tmp_path / "b.tar", [("1.txt", b"a"), ("1.TXT", b"b")]))


def test_a_name_whose_numbers_follow_a_dot_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.data.tar_index.MAX_EXTENSIONS", 3)
    files = [(f"img.{number:06d}.txt", b"") for number in range(4)]
    assert len(TarDataset(write_tar(tmp_path / "a.tar", files[:3]))) == 1
    with pytest.raises(
        TaskError, match=r"b\.tar has more than 3 extensions, such as 000003\.txt of img\.000003\.txt: "
    ):
        TarDataset(write_tar(tmp_path / "b.tar", files))


@pytest.mark.parametrize(("kind", "word"), [(tarfile.LNKTYPE, "hard"), (tarfile.SYMTYPE, "symbolic")])
def test_a_link_is_said(tmp_path, kind, word):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.txt", "latest", "1.txt"):
            member = tarfile.TarInfo(name)
            if name != "0.txt":
                member.type, member.linkname = kind, "0.txt"
            tar.addfile(member)
    with pytest.raises(TaskError, match=rf"a\.tar has a {word} link at byte 1024, 1\.txt to 0\.txt, .*dereference"):
        TarDataset(tmp_path / "a.tar")


def test_a_name_that_exists_is_taken_literally(shards):
    (shards / "[b]").mkdir()
    for name in ("[b]/s-00.tar", "s-{00..01}.tar"):
        (shards / "s-00.tar").rename(shards / name)
        assert TarDataset(shards / name).paths == (shards / name,)
        (shards / name).rename(shards / "s-00.tar")
    (shards / "s-00.tar").rename(shards / "[b]/s-00.tar")
    assert TarDataset(shards / "[b]/s-{00..00}.tar").paths == (shards / "[b]/s-00.tar",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), r"TarDataset needs one tar file or more, got none"),
        (("s-{002..000}.tar",), r"the range \{002\.\.000\} of s-\{002\.\.000\}\.tar is empty: write the smaller"),
        (("s.tar", "txt"), r'fields="txt" is a string: write fields=\("txt",\)'),
        (("s.tar", ()), r"fields=\(\) names no extension: .*fields=None"),
    ],
)
def test_arguments_without_a_meaning_are_said(arguments, message):
    with pytest.raises(TaskError, match=message):
        TarDataset(arguments[0], **({"fields": arguments[1]} if len(arguments) > 1 else {}))


def test_a_file_that_was_cut_since_is_not_read_silently(shards):
    data = TarDataset(shards / "s-02.tar", fields=("txt",))
    os.truncate(shards / "s-02.tar", 20_000)
    with pytest.raises(TaskError, match=r"s-02\.tar ends at byte 20000, within a sample"):
        data[4]
