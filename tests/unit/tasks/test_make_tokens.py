from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.tasks import make_tokens
from hpctrain.tasks.make_tokens import main


def tokens_of(path: Path, dtype: str = "<u2") -> list[int]:
    return np.fromfile(path, dtype).tolist()


def test_bytes_of_text_and_of_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_tokens, "PIECE_CHARS", 4)  # pieces end within lines and within documents
    (tmp_path / "a.txt").write_bytes("Grüße\r\nan alle\n".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "one", "more": 1}\n{"text": ""}\n{"text": "two\\n"}')
    out = tmp_path / "made" / "here"
    words = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--out", str(out), "--held-out", "0.2"]
    assert main(words) == 0
    expected = [*"Grüße\r\nan alle\n".encode(), 0, *b"one", 0, 0, *b"two\n", 0]
    assert tokens_of(out / "train.bin") + tokens_of(out / "eval.bin") == expected
    assert len(tokens_of(out / "eval.bin")) == round(0.2 * len(expected))
    about = json.loads((out / "tokens.json").read_text())
    counts = {"train.bin": len(expected) - 6, "eval.bin": 6}
    assert about == {
        "tokenizer": "bytes",
        "vocab_size": 256,
        "end_of_text": 0,
        "dtype": "uint16",
        "documents": 4,
        "characters": 22,
        "tokens": counts,
    }
    printed = capsys.readouterr().out
    assert printed == "4 documents, 22 characters, 28 tokens of 256 as uint16: 22 in train.bin, 6 in eval.bin\n"


def test_a_mistake_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, bad, out = tmp_path / "a.txt", tmp_path / "bad.txt", tmp_path / "out"
    text.write_text("some text\n")
    bad.write_bytes(b"good until here\xff")
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"text": "one"}\n{"words": "two"}\n')
    mistakes = {
        (text, bad): "can't be read as UTF-8",
        (text, tmp_path / "missing.txt"): "No such file",
        (text, lines): 'bad.jsonl: expected {"text": "..."} in line 2',
        (text, "--held-out", "0.99"): "of 11 tokens 0 would be left for training",
        (text, "--held-out", "1"): "--held-out=1.0: expected a share",
        (text, "--tokenizer", "words"): "--tokenizer=words: unknown tokeniser; choose bytes, tiktoken:ENCODING",
    }
    for words, problem in mistakes.items():
        assert main([*map(str, words), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert problem in error
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "bad.jsonl", "bad.txt"]
    out.mkdir()
    assert main([str(text), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_without_held_out_tokens_there_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--held-out", "0"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tokens.json", "train.bin", "train.bin.ends"]
