"""Turn text into tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Turns text into numbers, and back.

    Attributes:
        encode: returns the tokens of a text.
        decode: returns the text of tokens.
        vocab_size: every token is below it.
        end_of_text: the token that ends a document; None if it wasn't asked for.
    """

    encode: Callable[[str], Sequence[int] | npt.NDArray[Any]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    end_of_text: int | None


def tokeniser(name: str, end_of_text: str | None = "<|endoftext|>") -> Tokeniser:
    """Make the tokeniser named `bytes`, `tiktoken:ENCODING` or `tokenizers:PATH`.

    Args:
        name: one of these.
        end_of_text: name of the token that ends a document, for `tokenizers:PATH`; None if it isn't needed.

    Raises:
        ConfigError: the name is unknown, or the tokeniser isn't available.
    """
    kind, _, source = name.partition(":")
    if name == "bytes":
        # a document ends with a zero, which doesn't occur in text
        return Tokeniser(_bytes, _text_of_bytes, vocab_size=256, end_of_text=0)
    if kind == "tiktoken" and source:
        return _tiktoken(source)
    if kind == "tokenizers" and source:
        return _tokenizers(source, end_of_text)
    remedy = "choose bytes, tiktoken:ENCODING or tokenizers:PATH"
    raise ConfigError("--tokenizer", name, "unknown tokeniser", remedy)


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(errors="replace"), np.uint8)


def _text_of_bytes(tokens: Sequence[int]) -> str:
    return bytes(token % 256 for token in tokens).decode(errors="replace")


def _tiktoken(name: str) -> Tokeniser:
    tiktoken = _package("tiktoken", 'pip install "hpctrain[tokens]"')
    try:
        # may download the encoding's table, once
        encoding = tiktoken.get_encoding(name)
    except (ValueError, OSError) as error:
        first = str(error).partition("\n")[0]
        remedy = "see tiktoken.list_encoding_names(), and set TIKTOKEN_CACHE_DIR on a machine without network"
        raise ConfigError("--tokenizer", f"tiktoken:{name}", f"is not available ({first})", remedy) from error
    # not `encode`: that raises where a text contains the name of a special token
    encode, decode = encoding.encode_ordinary, encoding.decode
    return Tokeniser(encode, lambda tokens: str(decode(list(tokens))), int(encoding.n_vocab), int(encoding.eot_token))


def _tokenizers(path: str, end_of_text: str | None) -> Tokeniser:
    tokenizers = _package("tokenizers", "pip install tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises no narrower exception
        problem = f"can't be read ({error})"
        raise ConfigError("--tokenizer", f"tokenizers:{path}", problem, "name a tokenizer.json") from error
    end_id: int | None = None if end_of_text is None else tokenizer.token_to_id(end_of_text)
    if end_of_text is not None and end_id is None:
        remedy = "name the token that ends a document"
        raise ConfigError("--end-of-text", end_of_text, f"is not a token of {path}", remedy)
    # not the number of tokens: ids may have gaps
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return Tokeniser(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)),
        vocab_size=vocab_size,
        end_of_text=end_id,
    )


def _package(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError("--tokenizer", name, "isn't installed", remedy) from error
