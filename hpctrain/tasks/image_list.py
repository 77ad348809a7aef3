"""The image files of a data set with a folder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hpctrain.errors import ConfigError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class ImageList:
    """Paths and labels, in an order that depends only on the names: classes sorted, then files sorted.

    Args:
        folder: holds one folder per class, with images at any depth; names that begin with a dot are ignored.
        classes: names of the classes in the order of their labels; None: those of the folder, sorted.

    Attributes:
        classes: names of the classes; a label is an index into them.
        labels: int64 of shape [num_images].

    Raises:
        ConfigError: the folder doesn't exist or has no class, or a class has no images or isn't in ``classes``.
    """

    def __init__(self, folder: Path, classes: Sequence[str] | None = None) -> None:
        self._folder = folder
        found = _class_names(folder)
        self.classes = tuple(found if classes is None else classes)
        # arrays, not a list of strings: reading a string changes its reference count, so a million of them would be
        # copied page by page into every DataLoader worker
        names = bytearray()
        labels: list[int] = []
        ends = [0]
        for name in found:
            if name not in self.classes:
                known = f"{len(self.classes)} classes, from {self.classes[0]} to {self.classes[-1]}"
                problem = f"the class {name} isn't among those of the training images ({known})"
                raise ConfigError("task.data", folder, problem, "remove its folder, or add it to the training images")
            label, before = self.classes.index(name), len(labels)
            for path in _images(folder / name):
                names += os.fsencode(f"{name}/{path}")
                ends.append(len(names))
                labels.append(label)
            if len(labels) == before:
                problem = f"the class {name} has no image ({', '.join(SUFFIXES)})"
                raise ConfigError("task.data", folder, problem, "add images to its folder, or remove it")
        self._names = np.frombuffer(names, np.uint8)
        self._ends = np.array(ends)
        self.labels = np.array(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:
        """Path and label of an image."""
        name = os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]].tobytes())
        return os.path.join(self._folder, name), int(self.labels[index])  # noqa: PTH118 - a tenth of a Path's time


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        remedy = "set task.data to the folder that contains it, task.train and task.eval to its name there"
        raise ConfigError("task.data", folder, "is not a folder", remedy)
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ConfigError("task.data", folder, "contains no folders", "make one folder per class")
    return names


def _images(folder: Path) -> Iterator[str]:
    for place, inside, files in os.walk(folder, followlinks=True):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        relative = os.path.relpath(place, folder)
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield name if relative == "." else f"{relative}/{name}"
