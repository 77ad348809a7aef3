from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.tasks.image_folder import ImageList


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def test_classes_and_files_are_sorted_and_labelled(tmp_path: Path) -> None:
    make(tmp_path, "dog/b.JPEG", "dog/a.png", "cat/deep/er/y.jpg", "cat/z.webp", "ant/ü 1.gif", "readme.md")
    make(tmp_path, "cat/notes.txt", "cat/.hidden.png", ".cache/x.png", "cat/.cache/x.png")
    images = ImageList(tmp_path)
    assert images.classes == ("ant", "cat", "dog")
    names = {"ant/ü 1.gif": 0, "cat/z.webp": 1, "cat/deep/er/y.jpg": 1, "dog/a.png": 2, "dog/b.JPEG": 2}
    expected = [(str(tmp_path / name), label) for name, label in names.items()]
    assert [images[index] for index in range(len(images))] == expected
    assert pickle.loads(pickle.dumps(images))[4] == expected[4]


def test_a_held_out_folder_takes_the_labels_of_the_training_folder(tmp_path: Path) -> None:
    held_out = ImageList(make(tmp_path, "dog/a.png"), ("ant", "dog"))
    assert held_out.labels.tolist() == [1]
    make(tmp_path, "eel/a.png")
    with pytest.raises(ConfigError, match=r"the class eel isn't among .*2 classes, from ant to dog"):
        ImageList(tmp_path, ("ant", "dog"))


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.data=\S+/train: is not a folder; set task\.data"):
        ImageList(tmp_path / "train")
    with pytest.raises(ConfigError, match=r"contains no folders; make one folder per class"):
        ImageList(make(tmp_path, "a.png"))
    make(tmp_path, "ant/a.png", "bee/readme.md")
    with pytest.raises(ConfigError, match=r"the class bee has no image \(\.bmp, "):
        ImageList(tmp_path)
