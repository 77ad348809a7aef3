"""Turn text into tokens."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import ConfigError


class Tokeniser(Protocol):
    """Turns text into numbers.

    Attributes:
        vocab_size: every token is below it.
        end_of_text: the token that ends a document.
    """

    vocab_size: int
    end_of_text: int

    def __call__(self, text: str) -> npt.NDArray[Any]:
        """The tokens of a text, of shape [length]; any integer type."""
        ...


class ByteTokeniser:
    """The bytes of UTF-8; needs no package. A document ends with a zero, which doesn't occur in text."""

    vocab_size, end_of_text = 256, 0

    def __call__(self, text: str) -> npt.NDArray[Any]:
        """See `Tokeniser`."""
        return np.frombuffer(text.encode(errors="replace"), np.uint8)


class Tiktoken:
    """An encoding of tiktoken, such as gpt2; tiktoken may download its table once.

    Raises:
        ConfigError: tiktoken isn't installed, has no such encoding, or can't download it.
    """

    def __init__(self, name: str) -> None:
        tiktoken = _package("tiktoken", 'pip install "hpctrain[tokens]"')
        try:
            self._encoding = tiktoken.get_encoding(name)
        except (ValueError, OSError) as error:
            first = str(error).partition("\n")[0]
            remedy = "see tiktoken.list_encoding_names(), and set TIKTOKEN_CACHE_DIR on a machine without network"
            raise ConfigError("--tokenizer", f"tiktoken:{name}", f"is not available ({first})", remedy) from error
        self.vocab_size = int(self._encoding.n_vocab)
        self.end_of_text = int(self._encoding.eot_token)

    def __call__(self, text: str) -> npt.NDArray[Any]:
        """See `Tokeniser`."""
        return np.array(self._encoding.encode_ordinary(text), np.uint32)


class TokenizersFile:
    """A ``tokenizer.json`` of Hugging Face's `tokenizers`.

    Args:
        path: of the file.
        end_of_text: name of the token that ends a document.

    Raises:
        ConfigError: `tokenizers` isn't installed, the file can't be read, or it has no such token.
    """

    def __init__(self, path: str, end_of_text: str) -> None:
        tokenizers = _package("tokenizers", "pip install tokenizers")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises no narrower exception
            problem = f"can't be read ({error})"
            raise ConfigError("--tokenizer", f"tokenizers:{path}", problem, "name a tokenizer.json") from error
        found = self._tokenizer.token_to_id(end_of_text)
        if found is None:
            remedy = "name the token that ends a document"
            raise ConfigError("--end-of-text", end_of_text, f"is not a token of {path}", remedy)
        # not the number of tokens: ids may have gaps
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.end_of_text = int(found)

    def __call__(self, text: str) -> npt.NDArray[Any]:
        """See `Tokeniser`."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)


def tokeniser(name: str, end_of_text: str = "<|endoftext|>") -> Tokeniser:
    """Make the tokeniser named `bytes`, `tiktoken:ENCODING` or `tokenizers:PATH`.

    Raises:
        ConfigError: the name is unknown, or the tokeniser isn't available.
    """
    kind, _, rest = name.partition(":")
    if name == "bytes":
        return ByteTokeniser()
    if kind == "tiktoken" and rest:
        return Tiktoken(rest)
    if kind == "tokenizers" and rest:
        return TokenizersFile(str(Path(rest)), end_of_text)
    raise ConfigError("--tokenizer", name, "unknown tokeniser", "choose bytes, tiktoken:ENCODING or tokenizers:PATH")


def _package(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError("--tokenizer", name, "isn't installed", remedy) from error
