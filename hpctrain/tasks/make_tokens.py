"""Token files from text: ``python -m hpctrain.tasks.make_tokens TEXT... --out FOLDER``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, HpctrainError
from hpctrain.files import errors_naming, fsync_directory, temporary_name, write_atomic, write_json
from hpctrain.phrases import counted
from hpctrain.tasks.token_files import DTYPES, ENDS_SUFFIX, INFO_FILE
from hpctrain.tasks.tokeniser import Tokeniser, tokeniser

PIECE_CHARS = 1 << 20
"""Characters to tokenise at a time, extended to the end of a line."""
COPY_BYTES = 1 << 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Make token files, and print a summary.

    Args:
        arguments: of the command line; None for this process's own.

    Returns:
        An `ExitCode`.
    """
    options = _parser().parse_args(arguments)
    try:
        chosen = tokeniser(options.tokenizer, options.end_of_text)
        record = make_tokens(options.texts, options.out, chosen, name=options.tokenizer, held_out=options.held_out)
    except HpctrainError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)  # noqa: T201 - a command
        return error.exit_code
    counts = record["tokens"]
    print(  # noqa: T201 - a command
        f"{counted(record['documents'], 'document')}, {counted(record['characters'], 'character')}, "
        f"{counted(sum(counts.values()), 'token')} of {record['vocab_size']} as {record['dtype']}: "
        f"{', '.join(f'{counts[name]} in {name}' for name in counts)}"
    )
    return ExitCode.FINISHED


def make_tokens(
    texts: Sequence[Path], out: Path, chosen: Tokeniser, *, name: str, held_out: float = 0.01
) -> dict[str, Any]:
    """Write ``train.bin``, ``eval.bin``, the ends of their documents, and ``tokens.json``: all of them, or nothing.

    The text is read piece by piece, so it may be larger than the memory.

    Args:
        texts: files of UTF-8: each line of a ``.jsonl`` holds a document, as its "text"; any other file is one.
        out: the folder to make.
        chosen: the tokeniser.
        name: of the tokeniser, for the record.
        held_out: share of the tokens, from the end, that go into ``eval.bin``; 0: no such file.

    Returns:
        The contents of ``tokens.json``.

    Raises:
        ConfigError: the folder exists, a text can't be read, or no tokens would be left for training or evaluation.
    """
    if out.exists():
        raise ConfigError("--out", out, "already exists", "remove it, or name another folder")
    if not 0 <= held_out < 1:
        raise ConfigError("--held-out", held_out, "expected a share of the tokens", "set it between 0 and 1")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(out)
    temporary.mkdir()
    try:
        record = {"tokenizer": name, "vocab_size": chosen.vocab_size, "end_of_text": chosen.end_of_text}
        record |= _write(texts, temporary, chosen, held_out)
        write_json(temporary / INFO_FILE, record)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(out.parent)
    return record


def _write(texts: Sequence[Path], folder: Path, chosen: Tokeniser, held_out: float) -> dict[str, Any]:
    dtype = "uint16" if chosen.vocab_size <= 1 << 16 else "uint32"
    characters = tokens = 0
    ends = array("q")
    with errors_naming(folder / "train.bin"), (folder / "train.bin").open("w+b") as train:
        for piece in _pieces(texts):
            ids = [chosen.end_of_text] if piece is None else chosen.encode(piece)
            characters += len(piece or "")
            tokens += len(ids)
            if piece is None:
                ends.append(tokens)
            train.write(np.asarray(ids).astype(DTYPES[dtype]).tobytes())
        # at least two tokens: a window needs a token and its target
        num_train = tokens - round(tokens * held_out)
        if num_train < 2 or (held_out and tokens - num_train < 2):
            problem = f"of {tokens} tokens {num_train} would be left for training, {tokens - num_train} for evaluation"
            raise ConfigError("--held-out", held_out, problem, "add text, or set another share")
        counts = {"train.bin": num_train}
        if held_out:
            counts["eval.bin"] = tokens - num_train
            with errors_naming(folder / "eval.bin"), (folder / "eval.bin").open("wb") as evaluation:
                train.seek(num_train * DTYPES[dtype].itemsize)
                shutil.copyfileobj(train, evaluation, COPY_BYTES)
                _sync(evaluation)
            train.truncate(num_train * DTYPES[dtype].itemsize)
        _sync(train)
    _write_ends(folder, np.array(ends), num_train, tokens)
    return {"dtype": dtype, "documents": len(ends), "characters": characters, "tokens": counts}


def _write_ends(folder: Path, ends: npt.NDArray[np.int64], num_train: int, tokens: int) -> None:
    """Write the ends of the documents before and after the first ``num_train`` tokens; one may be cut there."""
    train = np.append(ends[ends < num_train], num_train)
    write_atomic(folder / f"train.bin{ENDS_SUFFIX}", train.astype("<i8").tobytes())
    if num_train < tokens:
        write_atomic(folder / f"eval.bin{ENDS_SUFFIX}", (ends[ends > num_train] - num_train).astype("<i8").tobytes())


def _pieces(texts: Sequence[Path]) -> Iterator[str | None]:
    """The texts piece by piece; None at the end of each document."""
    for path in texts:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                yield from _of_lines(path, file) if path.suffix == ".jsonl" else _of_file(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("TEXT", path, f"can't be read as UTF-8 ({error})", "fix the file") from error


def _of_file(file: IO[str]) -> Iterator[str | None]:
    while piece := file.read(PIECE_CHARS):
        # up to the end of the line, so that no word is split
        yield piece + file.readline()
    yield None


def _of_lines(path: Path, file: IO[str]) -> Iterator[str | None]:
    for number, line in enumerate(file, 1):
        try:
            yield str(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError) as error:
            problem = f'expected {{"text": "..."}} in line {number}'
            raise ConfigError("TEXT", path, problem, "fix the line") from error
        yield None


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tasks.make_tokens", description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help="UTF-8; .jsonl: one document per line")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to make, for task.data of task=tokens"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, tiktoken:ENCODING or tokenizers:PATH (default: %(default)s)",
    )
    parser.add_argument(
        "--end-of-text",
        default="<|endoftext|>",
        metavar="TOKEN",
        help="token that ends a document, for tokenizers:PATH (default: %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        default=0.01,
        type=float,
        metavar="SHARE",
        help="share of the tokens held out for evaluation (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
