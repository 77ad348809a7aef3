"""Token files from text: ``python -m hpctrain.tasks.make_tokens TEXT... --out FOLDER``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpctrain.errors import ConfigError, ExitCode, HpctrainError
from hpctrain.files import fsync_directory, temporary_name, write_json
from hpctrain.tasks.token_files import ABOUT, DTYPES
from hpctrain.tasks.tokeniser import Tokeniser, tokeniser

PIECE_CHARS = 1 << 20
"""About so much text is tokenised at a time, up to the next end of a line."""
COPY_BYTES = 1 << 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Make token files, and say what they hold.

    Args:
        arguments: the words after the program's name; None for those of this process.

    Returns:
        An `ExitCode`.
    """
    options = _parser().parse_args(arguments)
    try:
        chosen = tokeniser(options.tokenizer, options.end_of_text)
        record = make_tokens(options.texts, options.out, chosen, name=options.tokenizer, held_out=options.held_out)
    except HpctrainError as error:
        print(f"hpctrain: error: {error}", file=sys.stderr)  # noqa: T201 - a command
        return error.exit_code
    counts = record["tokens"]
    print(  # noqa: T201 - a command
        f"{record['documents']} documents, {record['characters']} characters, {sum(counts.values())} tokens of "
        f"{record['vocab_size']} as {record['dtype']}: {', '.join(f'{counts[name]} in {name}' for name in counts)}"
    )
    return ExitCode.FINISHED


def make_tokens(
    texts: Sequence[Path], out: Path, chosen: Tokeniser, *, name: str, held_out: float = 0.01
) -> dict[str, Any]:
    """Write ``train.bin``, ``eval.bin`` and ``tokens.json``: all of them, or nothing.

    Text is read piece by piece, so that its size doesn't matter.

    Args:
        texts: files of UTF-8: of a ``.jsonl`` each line is a document, its "text"; any other file is one.
        out: the folder that is made.
        chosen: makes the tokens.
        name: of the tokeniser, for the record.
        held_out: share of the tokens, from the end, that ``eval.bin`` gets; 0: it isn't made.

    Returns:
        What ``tokens.json`` holds.

    Raises:
        ConfigError: the folder is there already, a text can't be read, or nothing would be left to train on or to
            evaluate.
    """
    if out.exists():
        raise ConfigError("--out", out, "is there already", "remove it, or name another folder")
    if not 0 <= held_out < 1:
        raise ConfigError("--held-out", held_out, "is a share of the tokens", "set it between 0 and 1")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(out)
    temporary.mkdir()
    try:
        record = {"tokenizer": name, "vocab_size": chosen.vocab_size, "end_of_text": chosen.end_of_text}
        record |= _write(texts, temporary, chosen, held_out)
        write_json(temporary / ABOUT, record)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(out.parent)
    return record


def _write(texts: Sequence[Path], folder: Path, chosen: Tokeniser, held_out: float) -> dict[str, Any]:
    dtype = "uint16" if chosen.vocab_size <= 1 << 16 else "uint32"
    documents = characters = tokens = 0
    with (folder / "train.bin").open("w+b") as train:
        for piece in _pieces(texts):
            made = [chosen.end_of_text] if piece is None else chosen(piece)
            documents += piece is None
            characters += len(piece or "")
            tokens += len(made)
            train.write(_encoded(made, dtype))
        kept = tokens - round(tokens * held_out)
        if kept < 2 or (held_out and tokens - kept < 2):
            problem = f"of {tokens} tokens {kept} would be left to train on, {tokens - kept} to evaluate"
            raise ConfigError("--held-out", held_out, problem, "give more text, or another share")
        counts = {"train.bin": kept}
        if held_out:
            counts["eval.bin"] = tokens - kept
            with (folder / "eval.bin").open("wb") as evaluation:
                train.seek(kept * DTYPES[dtype].itemsize)
                shutil.copyfileobj(train, evaluation, COPY_BYTES)
                _sync(evaluation)
            train.truncate(kept * DTYPES[dtype].itemsize)
        _sync(train)
    return {"dtype": dtype, "documents": documents, "characters": characters, "tokens": counts}


def _encoded(tokens: Any, dtype: str) -> bytes:
    return np.asarray(tokens).astype(DTYPES[dtype]).tobytes()


def _pieces(texts: Sequence[Path]) -> Iterator[str | None]:
    """The texts piece by piece; None where a document ends."""
    for path in texts:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                yield from _of_lines(path, file) if path.suffix == ".jsonl" else _of_file(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("TEXT", path, f"can't be read as UTF-8 ({error})", "see the file") from error


def _of_file(file: IO[str]) -> Iterator[str | None]:
    while piece := file.read(PIECE_CHARS):
        yield piece + file.readline()
    yield None


def _of_lines(path: Path, file: IO[str]) -> Iterator[str | None]:
    for number, line in enumerate(file, 1):
        try:
            yield str(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError) as error:
            problem = f'line {number} should be {{"text": "..."}}'
            raise ConfigError("TEXT", path, problem, "see the file") from error
        yield None


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tasks.make_tokens", description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help="UTF-8; .jsonl: a document per line")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="is made; task.data of task=tokens")
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="NAME", help="bytes, tiktoken:ENCODING or tokenizers:PATH; %(default)s"
    )
    parser.add_argument(
        "--end-of-text", default="<|endoftext|>", metavar="TOKEN", help="ends a document, with tokenizers:PATH"
    )
    parser.add_argument(
        "--held-out", default=0.01, type=float, metavar="SHARE", help="of the tokens, for evaluation; %(default)s"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
