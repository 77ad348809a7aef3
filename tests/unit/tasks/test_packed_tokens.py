from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from hpctrain.data.fetch import BatchDataset
from hpctrain.errors import ConfigError, TaskError
from hpctrain.files import write_json
from hpctrain.models.gpt import GPT
from hpctrain.tasks.make_tokens import make_tokens
from hpctrain.tasks.token_files import IGNORED, PackedTokens, TokenFile, document_ends, sequence_bounds
from hpctrain.tasks.tokeniser import tokeniser
from hpctrain.tasks.tokens import Tokens

END = 9
DOCUMENTS = [[1, 2, 3, END], [4, END], [5, 6, END], [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, END], [3, END], [4, 5]]
"""One is longer than a sequence, and the last doesn't end."""


def write(path: Path, documents=DOCUMENTS) -> TokenFile:
    path.write_bytes(np.concatenate(documents).astype("<u2").tobytes())
    return TokenFile.of(path, "uint16")


def test_documents_are_packed_in_their_order(tmp_path: Path) -> None:
    packed = PackedTokens([write(tmp_path / "a.bin"), write(tmp_path / "b.bin", [[7, 8, END]])], 8, end_of_text=END)
    assert isinstance(packed, BatchDataset)
    given, targets, documents = packed.get_batch(torch.arange(len(packed)))
    x = IGNORED
    assert given.tolist() == [
        [1, 2, 3, END, 4, END, 0, 0],
        [5, 6, END, 0, 0, 0, 0, 0],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, END, 3, END, 4, 5, 0],
        [7, 8, END, 0, 0, 0, 0, 0],
    ]
    assert targets.tolist() == [
        [2, 3, END, x, END, x, x, x],
        [6, END, x, x, x, x, x, x],
        [2, 3, 4, 5, 6, 7, 8, 1],  # the document continues
        [2, END, x, END, x, 5, x, x],
        [8, END, x, x, x, x, x, x],
    ]
    assert documents.tolist()[0] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert documents.tolist()[2:4] == [[0] * 8, [0, 0, 0, 1, 1, 2, 2, 3]]
    assert packed.mean_targets == (targets != x).sum().item() / 5
    assert [part.tolist() for part in packed[3]] == [part[3].tolist() for part in (given, targets, documents)]
    assert pickle.loads(pickle.dumps(packed))[4][0].tolist() == given[4].tolist()


@examples(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 12))
def test_each_token_once_and_no_document_cut_that_fits(sizes: list[int], length: int) -> None:
    ends = np.cumsum(sizes)
    bounds = sequence_bounds(ends, length)
    assert bounds[0] == 0
    assert bounds[-1] == ends[-1]
    assert ((np.diff(bounds) > 0) & (np.diff(bounds) <= length)).all()
    for begin, end in zip([0, *ends], ends, strict=False):
        inside = [bound for bound in bounds if begin < bound < end]
        # pieces of a long document are full
        assert inside == list(range(begin + length, end, length))


def test_the_ends_of_documents_come_from_their_file_or_from_the_token(tmp_path: Path) -> None:
    file = write(tmp_path / "a.bin")
    expected = [4, 6, 9, 20, 22, 24]
    assert document_ends(file, END).tolist() == expected
    with pytest.raises(ConfigError, match=r"task\.end_of_text=null: it is unknown where the documents of \S+a\.bin"):
        document_ends(file, None)
    ends = tmp_path / "a.bin.ends"
    ends.write_bytes(np.array([5, 10]).astype("<i8").tobytes())
    assert document_ends(file, None).tolist() == [5, 10, 24]
    for wrong in ([5, 25], [5, 5], [0, 3], []):
        ends.write_bytes(np.array(wrong).astype("<i8").tobytes())
        with pytest.raises(ConfigError, match=r"a\.bin\.ends doesn't belong to the 24 tokens of a\.bin"):
            document_ends(file, None)


def test_made_token_files_have_their_ends(tmp_path: Path) -> None:
    for number, text in enumerate(("one", "three", "", "eleven", "t")):
        (tmp_path / f"{number}.txt").write_text(text)
    chosen = tokeniser("bytes")
    texts = sorted(tmp_path.glob("*.txt"))
    make_tokens(texts, tmp_path / "cut", chosen, name="bytes", held_out=0.3)
    make_tokens(texts, tmp_path / "whole", chosen, name="bytes", held_out=0)
    assert not (tmp_path / "whole/eval.bin.ends").exists()
    for path in (tmp_path / "cut/train.bin", tmp_path / "cut/eval.bin", tmp_path / "whole/train.bin"):
        file = TokenFile.of(path, "uint16")
        from_file = document_ends(file, None).tolist()
        path.with_name(path.name + ".ends").unlink()
        assert from_file == document_ends(file, 0).tolist()


def test_files_without_a_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.end_of_text=9: no document of \S+a\.bin has two tokens"):
        PackedTokens([write(tmp_path / "a.bin", [[END], [END]])], 8, end_of_text=END)
    with pytest.raises(TaskError, match=r"a\.bin holds the token 9, but the model has 9 tokens"):
        PackedTokens([write(tmp_path / "a.bin")], 8, end_of_text=END, vocab_size=9)[0]


@pytest.fixture
def task(tmp_path: Path) -> Tokens:
    write(tmp_path / "train.bin")
    write(tmp_path / "eval.bin", DOCUMENTS[:3])
    write_json(tmp_path / "tokens.json", {"vocab_size": 10, "dtype": "uint16", "end_of_text": END})
    return Tokens(str(tmp_path), context_length=12, packed=True)


def test_a_packed_document_has_the_logits_of_a_document_alone(task: Tokens) -> None:
    torch.manual_seed(0)
    network = GPT(vocab_size=10, context_length=12, num_layers=2, num_heads=2, width=16)
    given, _, documents = task.train_dataset().get_batch(torch.arange(2))
    assert given[0].tolist()[:9] == [1, 2, 3, END, 4, END, 5, 6, END]
    together = network(given, documents)
    for begin, end in ((0, 4), (4, 6), (6, 9)):
        torch.testing.assert_close(together[0, begin:end], network(given[:1, begin:end])[0])
    assert together.isfinite().all()


def test_the_loss_of_a_step_does_not_depend_on_its_micro_batches(task: Tokens) -> None:
    torch.manual_seed(0)
    network = GPT(vocab_size=10, context_length=12, num_layers=1, num_heads=1, width=8)
    data = task.train_dataset()
    assert len(data) == 3
    whole = task.loss(network, data.get_batch(torch.arange(3)))
    parts = [task.loss(network, data.get_batch(torch.tensor([index]))) for index in range(3)]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    given, targets, documents = data.get_batch(torch.arange(3))
    # over an epoch it is the mean per token
    torch.testing.assert_close(whole, F.cross_entropy(network(given, documents).flatten(0, 1), targets.flatten()))
    total, count = task.evaluate(network, data.get_batch(torch.arange(3)))["loss"]
    assert count == (targets != IGNORED).sum()
    torch.testing.assert_close(total / count, whole)
    assert len(task.eval_dataset()) == 1
