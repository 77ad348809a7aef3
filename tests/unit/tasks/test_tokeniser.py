from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import ConfigError
from hpctrain.tasks.make_tokens import main
from hpctrain.tasks.tokeniser import tokeniser


def test_bytes() -> None:
    chosen = tokeniser("bytes")
    assert chosen.encode("né").tolist() == list("né".encode())
    assert (chosen.vocab_size, chosen.end_of_text) == (256, 0)
    assert chosen.decode(list("né".encode())) == "né"


@pytest.mark.parametrize("name", ["words", "tiktoken:", "tokenizers:"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--tokenizer={name}: unknown tokeniser; choose bytes, tiktoken:ENCODING"):
        tokeniser(name)


def test_tiktokens_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason='pip install "hpctrain[tokens]"')
    plugin = tmp_path / "tiktoken_ext" / "toy.py"
    plugin.parent.mkdir()
    plugin.write_text(
        "def toy():\n"
        "    ranks = {bytes([n]): n for n in range(256)} | {b'th': 256, b'the': 257}\n"
        "    return dict(name='toy', pat_str=r'\\S+|\\s+', mergeable_ranks=ranks,\n"
        "                special_tokens={'<|endoftext|>': 70000})\n"
        "ENCODING_CONSTRUCTORS = {'toy': toy}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    (tmp_path / "a.txt").write_text("the <|endoftext|>")
    words = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--tokenizer", "tiktoken:toy", "--held-out", "0"]
    assert main(words) == 0
    assert np.fromfile(tmp_path / "out" / "train.bin", "<u4").tolist() == [257, 32, *b"<|endoftext|>", 70000]
    with pytest.raises(ConfigError, match=r"--tokenizer=tiktoken:none: is not available"):
        tokeniser("tiktoken:none")


def test_a_file_of_tokenizers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "[END]": 5}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    chosen = tokeniser(f"tokenizers:{tmp_path / 'tokenizer.json'}", "[END]")
    assert chosen.encode("b a c") == [1, 0, 2]
    assert (chosen.vocab_size, chosen.end_of_text) == (6, 5)
    assert tokeniser(f"tokenizers:{tmp_path / 'tokenizer.json'}", None).decode([1, 0]).split() == ["b", "a"]
    with pytest.raises(ConfigError, match=r"--end-of-text=<\|endoftext\|>: is not a token"):
        tokeniser(f"tokenizers:{tmp_path / 'tokenizer.json'}")
    with pytest.raises(ConfigError, match=r"missing\.json: can't be read"):
        tokeniser(f"tokenizers:{tmp_path / 'missing.json'}")
