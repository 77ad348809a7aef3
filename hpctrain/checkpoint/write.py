"""Write a snapshot to disk, so that its checkpoint is complete or absent at any time, even if the process dies."""

from __future__ import annotations

import logging
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

import torch
from torch import Tensor

from hpctrain.checkpoint.checksummed_file import ChecksummedFile
from hpctrain.checkpoint.disk_space import after_full, is_full
from hpctrain.checkpoint.host_memory import sharing_key
from hpctrain.checkpoint.retention import discard_replaced, move_aside
from hpctrain.checkpoint.state import Snapshot, tensors_in, weights_digest
from hpctrain.errors import CheckpointError
from hpctrain.files import errors_naming, fsync_directory, temporary_name
from hpctrain.run.checkpoint_manifest import ALGORITHM, FORMAT_VERSION, MANIFEST, PARTS, SAFETENSORS, encode_manifest
from hpctrain.run.checkpoints import file_checksum
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import limit_met
from hpctrain.run.gone_checkpoints import record_saved
from hpctrain.run.ledger import Claim


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
        written = {name: files[name].result() for name in files}
        write_manifest(path, snapshot.state, written, version=FORMAT_VERSION, weights_digest=digest.result())


def write_part(path: Path, part: Any) -> dict[str, Any]:
    """Write a value by torch.save into a new file, make it durable, and return its entry in the manifest."""
    file = ChecksummedFile(path)
    try:
        torch.save(part, cast(IO[bytes], file))
    finally:
        file.close()
    return {"bytes": file.bytes, "checksum": file.checksum}


def _write_safetensors(path: Path, model: Mapping[str, Tensor]) -> dict[str, Any]:
    from safetensors import SafetensorError, TensorSpec, serialize_file

    # extra state of a module has no place in the format
    tensors = {name: value.contiguous() for name, value in model.items() if isinstance(value, Tensor)}
    try:
        # not `save_file`, which refuses tied weights: each of their names gets the same elements
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


log = logging.getLogger("hpctrain.checkpoint")


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
            advice = after_full(directory, error, temporary)
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
    replaced = move_aside(final) if final.exists() else None
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
    file = ChecksummedFile(path / MANIFEST)
    file.write(encode_manifest(manifest))
    file.close()
    fsync_directory(path)


def _make_folder(directory: RunDirectory) -> None:
    folder = directory.checkpoints
    try:
        folder.mkdir(stat.S_IMODE(directory.path.stat().st_mode))
    except FileExistsError:
        return
    log.warning("%s was removed, with its contents: created again", folder)
