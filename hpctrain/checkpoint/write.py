"""Write a snapshot to disk, so that its checkpoint is complete or absent at any time, even if the process dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from hpctrain.checkpoint.host_memory import sharing_key
from hpctrain.checkpoint.retention import discard_replaced, explain_full, is_full, move_replaced
from hpctrain.checkpoint.state import Snapshot, tensors_in, weights_digest
from hpctrain.errors import CheckpointError
from hpctrain.files import errors_naming, fsync_directory, temporary_name
from hpctrain.run.checkpoint_manifest import ALGORITHM, FORMAT_VERSION, MANIFEST, PARTS, SAFETENSORS, encode_manifest
from hpctrain.run.checkpoints import file_checksum
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import limit_met
from hpctrain.run.gone_checkpoints import record_saved
from hpctrain.run.ledger import Claim

log = logging.getLogger("hpctrain.checkpoint")

_BLOCK_BYTES = 4 << 20
UNCOPIED_FROM_BYTES = 1 << 20
"""Bytes that are worth a write of their own, and of what comes before them, without a copy."""


class ChecksummedFile:
    """A new file, written once from start to end, bypassing the page cache if the file system supports that.

    Direct I/O (open(2), O_DIRECT) saves the memory and most of the processor time that a buffered write of gigabytes
    takes from training. `close`, or the end of its context, raises the error of an earlier write.

    Args:
        path: must not exist.

    Raises:
        OSError: it can't be created.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
            self._descriptor = os.open(path, flags, 0o666)
        self._path = path
        self.bytes = 0
        # Against damage, not forgery: a cryptographic digest of every byte would take several times longer. One for
        # each file, and no tree of them, so that `xxhsum -H2` can check it.
        self._digest = xxhash.xxh3_128()
        # page-aligned, as direct I/O requires, and shared, so that forking a DataLoader worker can't copy it
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        # NumPy releases the GIL while it copies, so training doesn't wait
        self._bytes_of_block = np.frombuffer(self._block, np.uint8)
        self._filled = 0
        # kept until `close`: torch's zip writer, which calls `write`, would hide it behind its own error
        self._error: OSError | None = None

    @property
    def checksum(self) -> str:
        """XXH3 (128 bits) of the bytes written so far, in hexadecimal."""
        return self._digest.hexdigest()

    @property
    def entry(self) -> dict[str, Any]:
        """The file's entry in the manifest."""
        return {"bytes": self.bytes, "checksum": self.checksum}

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``, and return its length in bytes."""
        view = memoryview(data).cast("B")
        count = len(view)
        self.bytes += count
        while len(view) and self._error is None:
            if self._filled % mmap.PAGESIZE == 0 and len(view) >= UNCOPIED_FROM_BYTES and _is_aligned(view):
                view = self._write_uncopied(view)
                continue
            piece = view[: _BLOCK_BYTES - self._filled]
            self._digest.update(piece)
            self._bytes_of_block[self._filled : self._filled + len(piece)] = np.frombuffer(piece, np.uint8)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == _BLOCK_BYTES:
                self._write_block()
        return count

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""

    def close(self) -> None:
        """Write the rest, make the file durable, and close it.

        Raises:
            OSError: this write or an earlier one failed; the file is closed nevertheless.
        """
        with errors_naming(self._path):
            try:
                if self._filled and self._error is None:
                    # direct I/O takes whole pages only
                    self._use_page_cache()
                    self._write_block()
                if self._error is not None:
                    raise self._error
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)

    def _write_uncopied(self, data: memoryview) -> memoryview:
        """Write whole pages from where they are, and return the rest; the file ends at a page."""
        if self._filled:
            self._write_block()
        count = len(data) // mmap.PAGESIZE * mmap.PAGESIZE
        for begin in range(0, count, _BLOCK_BYTES):
            piece = data[begin : min(begin + _BLOCK_BYTES, count)]
            self._digest.update(piece)
            self._write_all(piece)
        return data[count:]

    def _write_block(self) -> None:
        self._write_all(self._block[: self._filled])
        self._filled = 0

    def _write_all(self, data: memoryview) -> None:
        try:
            while len(data) and self._error is None:
                data = data[self._write_some(data) :]
        except OSError as error:
            self._error = error

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            # some file systems accept O_DIRECT and then reject the write; a short write leaves the offset unaligned
            if error.errno != errno.EINVAL or not self._use_page_cache():
                raise
            return os.write(self._descriptor, data)

    def _use_page_cache(self) -> bool:
        """Leave direct I/O, and return whether it was in use."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


def _is_aligned(data: memoryview) -> bool:
    """Whether direct I/O can write the data from where they are."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) % mmap.PAGESIZE == 0


class CheckpointWriter:
    """Writes snapshots of one run, each complete or absent. Only rank zero uses it.

    Args:
        directory: of the run.
        claim: of this attempt, checked before anything is written and before it is published.
        safetensors: also write the model's weights in that format.
    """

    def __init__(self, directory: RunDirectory, claim: Claim, *, safetensors: bool = False) -> None:
        self._directory = directory
        self._claim = claim
        self._safetensors = safetensors

    def write(self, snapshot: Snapshot) -> Path:
        """Write a snapshot, make it durable and publish it.

        Args:
            snapshot: must not change until this returns.

        Returns:
            The directory of the checkpoint.

        Raises:
            SupersededError: a later attempt owns the run; nothing was published.
            CheckpointError: a file can't be written; earlier checkpoints are unchanged.
        """
        with unpublished(self._directory, self._claim, snapshot.step) as temporary:
            self._write_files(snapshot, temporary)
            return publish(temporary, self._directory.checkpoint(snapshot.step), self._claim)

    def size_of(self, snapshot: Snapshot) -> int:
        """Return about how many bytes the checkpoint of a snapshot takes: those of its tensors."""
        parts = (snapshot.model, snapshot.optimizer, snapshot.state)
        size = sum({sharing_key(tensor): tensor.nbytes for tensor in tensors_in(parts)}.values())
        # tied weights are written under each of their names
        return size + (sum(tensor.nbytes for tensor in tensors_in(snapshot.model)) if self._safetensors else 0)

    def _write_files(self, snapshot: Snapshot, path: Path) -> None:
        # the largest part first
        parts = dict(zip(PARTS, (snapshot.optimizer, snapshot.model, snapshot.state), strict=True))
        # side by side: checksums, digest and writes all release the GIL
        with ThreadPoolExecutor(len(parts) + 2) as threads, without_crc32():
            digest = threads.submit(weights_digest, snapshot.model)
            files = {
                # torch keeps the option per context, older versions per process: a copied context works for both
                name: threads.submit(copy_context().run, write_part, path / name, part)
                for name, part in parts.items()
            }
            if self._safetensors:
                files[SAFETENSORS] = threads.submit(_write_safetensors, path / SAFETENSORS, snapshot.model)
        entries = {name: files[name].result() for name in files}
        write_manifest(path, snapshot.state, entries, version=FORMAT_VERSION, weights_digest=digest.result())


def write_part(path: Path, part: Any) -> dict[str, Any]:
    """Write a value by torch.save into a new file, make it durable, and return its entry in the manifest."""
    with ChecksummedFile(path) as file:
        torch.save(part, cast(IO[bytes], file))
    return file.entry


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Write a new file, make it durable, and return its entry in the manifest."""
    with ChecksummedFile(path) as file:
        file.write(data)
    return file.entry


def _write_safetensors(path: Path, model: Mapping[str, Tensor]) -> dict[str, Any]:
    from safetensors import SafetensorError, TensorSpec, serialize_file

    # extra state of a module has no place in the format
    tensors = {name: value.contiguous() for name, value in model.items() if isinstance(value, Tensor)}
    try:
        # By the package, which tests every dtype. It writes through the page cache, so the checksum is of the file read
        # back. Not by `save_file`, which refuses tied weights: each of their names gets the same elements.
        specs = {
            name: TensorSpec(
                dtype=str(value.dtype).removeprefix("torch."),
                shape=value.shape,
                data_ptr=value.data_ptr(),
                # a subclass without memory of its own is at address 0, and refused for its missing bytes
                data_len=value.nbytes if value.data_ptr() else 0,
            )
            for name, value in tensors.items()
        }
        serialize_file(specs, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path.name}: {error}; checkpoint.safetensors=false leaves this file out") from error
    # the package creates it readable by its owner alone; the directory has the mode that the umask gives
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o666)
    with errors_naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "checksum": file_checksum(path)}


@contextmanager
def without_crc32() -> Iterator[None]:
    """Leave out the zip format's own checksums, which take longer than the write and which torch.load ignores."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextmanager
def unpublished(directory: RunDirectory, claim: Claim, step: int) -> Iterator[Path]:
    """Make a temporary directory for the files of a checkpoint; publish it inside the context, or it is removed.

    Args:
        directory: of the run.
        claim: of this attempt.
        step: of the checkpoint.

    Raises:
        SupersededError: a later attempt owns the run; nothing was published.
        CheckpointError: a file can't be written; earlier checkpoints are unchanged.
    """
    final = directory.checkpoint(step)
    temporary = temporary_name(final)
    try:
        claim.require_ownership()
        _make_folder(directory)
        temporary.mkdir()
        yield temporary
        record_saved(directory.attempt(claim.attempt), step)
    except (OSError, CheckpointError) as error:
        # a later attempt removes this attempt's temporary directory: check for that before blaming the disk
        with suppress(OSError):
            claim.require_ownership()
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        advice = limit_met(error, directory.checkpoints) or "check that the file system is writable"
        if is_full(error):
            advice = explain_full(directory, error, temporary)
        raise CheckpointError(
            f"the checkpoint of step {step} can't be written to {final}: {reason}; earlier checkpoints are unchanged; "
            f"{advice}"
        ) from error
    finally:
        # once it is published, nothing has this name any more
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, final: Path, claim: Claim) -> Path:
    """Give a complete checkpoint its name, and return its path; one of the same step is replaced.

    Args:
        temporary: its directory, durable with all files.
        final: its path.
        claim: of this attempt.

    Raises:
        SupersededError: a later attempt owns the run.
        OSError: the file system refuses.
    """
    claim.require_ownership()
    replaced = move_replaced(final) if final.exists() else None
    try:
        temporary.rename(final)
    except BaseException:
        if replaced is not None:
            replaced.rename(final)
        raise
    fsync_directory(final.parent)
    if replaced is not None:
        try:
            discard_replaced(replaced)
        except OSError as error:
            log.warning("%s was replaced and can't be removed: %s", replaced, error.strerror)
    return final


def write_manifest(
    path: Path,
    state: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    *,
    version: int,
    weights_digest: str,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Write the manifest of the checkpoint in the directory ``path``, and make both durable.

    Args:
        path: with all other files.
        state: with the fields of `Head`.
        files: size and checksum of each other file, by name.
        version: of the format.
        weights_digest: of the weights.
        mesh: the degrees of the mesh whose ranks wrote it, by name; None for a whole checkpoint.
    """
    manifest = {
        "format_version": version,
        "algorithm": ALGORITHM,
        **{name: state[name] for name in ("step", "samples_seen", "world_size", "config_digest")},
        **({} if mesh is None else {"mesh": dict(mesh)}),
        "weights_digest": weights_digest,
        "score": state["score"],
        "time": time.time(),
        "files": {name: files[name] for name in sorted(files)},
    }
    write_bytes(path / MANIFEST, encode_manifest(manifest))
    fsync_directory(path)


def _make_folder(directory: RunDirectory) -> None:
    folder = directory.checkpoints
    try:
        folder.mkdir(stat.S_IMODE(directory.path.stat().st_mode))
    except FileExistsError:
        return
    log.warning("%s was removed, with its contents: created again", folder)
