"""With webdataset itself: files that it writes, and the samples that it reads from them."""

from __future__ import annotations

import gc
import io
import tarfile

import numpy as np
import pytest

from hpctrain.data.tar_dataset import TarDataset

# webdataset leaves its files open
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
LEFT_OUT = ("__url__", "__local_path__")


def as_bytes(extension, data):
    return data


def read_by_webdataset(path):
    webdataset = pytest.importorskip("webdataset")
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False))
    gc.collect()  # closes the file here, and not in another test
    return [{name: value for name, value in sample.items() if name not in LEFT_OUT} for sample in samples]


def test_what_webdataset_writes(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(5):
            writer.write(
                {
                    "__key__": f"set.{number % 2}/{number:05d}",
                    "cls": number,
                    "json": {"number": number},
                    "npy": np.arange(number),
                    "seg.left.txt": f"text of {number}",
                }
            )
    expected = read_by_webdataset(tmp_path / "a.tar")
    assert len(expected) == 5
    data = TarDataset(tmp_path / "a.tar", decode=as_bytes)
    assert [data[index] for index in range(len(data))] == expected
    decoded = TarDataset(tmp_path / "a.tar", fields=("cls", "npy", "seg.left.txt"))
    assert [(number, array.tolist(), text) for number, array, text in decoded] == [
        (number, list(range(number)), f"text of {number}") for number in range(5)
    ]


def test_names_that_webdataset_treats_in_a_way_of_its_own(tmp_path):
    names = [
        "./one.TXT",
        "./one.b.TXT",
        "__meta__",
        "__meta__/x.txt",
        "no_extension",
        ".hidden",
        "a.b/two.txt",
        "a.b/two.json",
        "deep/er/" + "n" * 120 + ".cls",
        "one.txt",  # the same key as the first, but not next to it
        "last.",
    ]
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{kind}.tar"
        with tarfile.open(path, "w", format=kind) as tar:
            tar.addfile(tarfile.TarInfo("folder.d/"))
            for number, name in enumerate(names):
                member = tarfile.TarInfo(name)
                content = b"x" * (600 * number)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        data = TarDataset(path, decode=as_bytes)
        assert [data[index] for index in range(len(data))] == read_by_webdataset(path)
