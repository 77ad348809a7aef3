from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.data.fetch import BatchDataset
from hpctrain.errors import ConfigError, TaskError
from hpctrain.tasks.token_files import TokenFile, TokenWindows, find_token_files, read_info


def save(path: Path, tokens: range, dtype: str = "<u2") -> Path:
    array = np.array(tokens, dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        path.write_bytes(array.tobytes())
    return path


def test_windows_follow_each_other_in_every_file_and_cross_no_border(tmp_path: Path) -> None:
    save(tmp_path / "train_0.bin", range(10))  # three windows of 3, each with the token after it
    save(tmp_path / "train_1.npy", range(100, 103), "<u4")  # too short for one
    save(tmp_path / "train_2.npy", range(200, 208), "<u4")  # two, and a rest
    files = find_token_files("task.train", tmp_path, "train*", "uint16")
    assert [(file.path.name, file.length) for file in files] == [
        ("train_0.bin", 10),
        ("train_1.npy", 3),
        ("train_2.npy", 8),
    ]
    windows = TokenWindows(files, 3)
    assert isinstance(windows, BatchDataset)
    assert len(windows) == 5
    given, targets = windows.get_batch(torch.tensor([4, 0, 2, 3]))
    assert given.tolist() == [[203, 204, 205], [0, 1, 2], [6, 7, 8], [200, 201, 202]]
    assert targets.tolist() == [[204, 205, 206], [1, 2, 3], [7, 8, 9], [201, 202, 203]]
    assert given.dtype == torch.int64
    assert [part.tolist() for part in windows[1]] == [[3, 4, 5], [4, 5, 6]]


def test_a_pickled_dataset_holds_no_tokens(tmp_path: Path) -> None:
    windows = TokenWindows([TokenFile.of(save(tmp_path / "a.bin", range(60000)), "uint16")], 8)
    first = windows[0]
    sent = pickle.dumps(windows)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent)[0][1], first[1])


def test_large_tokens_survive(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", range(4_000_000_000, 4_000_000_005), "<u4")
    assert TokenWindows([TokenFile.of(path, "uint32")], 4)[0][1].tolist()[-1] == 4_000_000_004


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    files = [TokenFile.of(save(tmp_path / f"{name}.bin", range(end)), "uint16") for name, end in (("a", 5), ("b", 9))]
    windows = TokenWindows(files, 4, vocab_size=8)
    assert windows[0][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(TaskError, match=r"b\.bin holds the token 8, but the model has 8 tokens: .*model\.vocab_size"):
        windows.get_batch(torch.tensor([0, 1, 2]))


def test_files_that_can_not_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.data=\S+/nowhere: is not a folder"):
        find_token_files("task.train", tmp_path / "nowhere", "train*", None)
    save(tmp_path / "train.txt", range(4))
    with pytest.raises(ConfigError, match=r"task\.train=train\*: no \.bin or \.npy file .* which holds train\.txt"):
        find_token_files("task.train", tmp_path, "train*", None)
    path = save(tmp_path / "train.bin", range(4))
    with pytest.raises(ConfigError, match=r"task\.dtype=null: it is unknown whether .*set task\.dtype=uint16"):
        find_token_files("task.train", tmp_path, "train*", None)
    with pytest.raises(ConfigError, match=r"task\.context_length=4: no window .* the longest has 4"):
        TokenWindows([TokenFile.of(path, "uint16")], 4)
    path.write_bytes(b"odd")
    with pytest.raises(ConfigError, match=r"task\.dtype=uint16: the 3 bytes of \S+train\.bin are not"):
        TokenFile.of(path, "uint16")
    np.save(tmp_path / "square.npy", np.zeros((2, 2)))
    with pytest.raises(ConfigError, match=r"square\.npy holds float64 of shape \[2, 2\]"):
        TokenFile.of(tmp_path / "square.npy", None)


def test_tokens_json_is_optional(tmp_path: Path) -> None:
    assert read_info(tmp_path) == {}
