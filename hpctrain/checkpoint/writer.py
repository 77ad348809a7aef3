"""Checkpoints on their way to the disk."""

from __future__ import annotations

import logging
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from hpctrain.checkpoint.digest import weights_digest
from hpctrain.checkpoint.exchange import write_safetensors
from hpctrain.checkpoint.removal import discard_replaced, move_aside, remove_checkpoint
from hpctrain.checkpoint.retention import ALWAYS_KEPT, Retention
from hpctrain.checkpoint.state import Snapshot
from hpctrain.checkpoint.stream import ChecksummedFile
from hpctrain.errors import CheckpointError
from hpctrain.files import fsync_directory, temporary_name
from hpctrain.run.checkpoints import (
    ALGORITHM,
    FORMAT_VERSION,
    MANIFEST,
    CheckpointInfo,
    encode_manifest,
    list_checkpoints,
    verify,
)
from hpctrain.run.directory import RunDirectory

log = logging.getLogger("hpctrain.checkpoint")


class CheckpointWriter:
    """Writes snapshots of one run, each complete or absent, and removes the old ones. Used by rank zero alone.

    Args:
        directory: of the run.
        ledger_check: raises SupersededError once a later attempt owns the run.
        retention: which ones stay.
        safetensors: write the model's weights in that format, too.
        clock: epoch seconds.
    """

    def __init__(
        self,
        directory: RunDirectory,
        ledger_check: Callable[[], None],
        retention: Retention,
        *,
        safetensors: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._ledger_check, self._clock = directory, ledger_check, clock
        self._retention, self._safetensors = retention, safetensors
        self._read_back: dict[int, str] = {}
        self._retaining = threading.Lock()

    def write(self, snapshot: Snapshot, *, retain: bool = True) -> Path:
        """Write, make durable and publish; then remove what is no longer kept.

        Args:
            snapshot: must not change until this returns.
            retain: False leaves the old ones, for when the time left is short.

        Returns:
            The directory of the checkpoint.

        Raises:
            SupersededError: a later attempt owns the run; nothing was published.
            CheckpointError: the file system refused; earlier checkpoints are as they were.
        """
        final = self._directory.checkpoint(snapshot.state["step"])
        temporary = temporary_name(final)
        try:
            self._ledger_check()
            self._make_folder()
            temporary.mkdir()
            self._write_files(snapshot, temporary)
            self._ledger_check()
            self._publish(temporary, final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = error.strerror or error
            # a later attempt takes our temporary directory away: that is its right, not the file system's fault
            with suppress(OSError):
                self._ledger_check()
            raise CheckpointError(
                f"the checkpoint of step {snapshot.state['step']} can't be written to {final}: {reason}; earlier "
                "checkpoints are as they were; see that the file system has room and can be written"
            ) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if retain:
            self.retain(intact=snapshot.state["step"])
        return final

    def retain(self, intact: int) -> None:
        """Remove what is no longer kept; what the file system doesn't let go is logged.

        Args:
            intact: the step of a checkpoint that needn't be read back: it was just written, or verified.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        with self._retaining:
            try:
                for step in self._steps_to_remove(intact):
                    self._ledger_check()
                    remove_checkpoint(self._directory.checkpoint(step))
                    self._read_back.pop(step, None)
            except OSError as error:
                log.warning("old checkpoints can't be removed: %s", error)

    def _make_folder(self) -> None:
        folder = self._directory.checkpoints
        try:
            folder.mkdir(stat.S_IMODE(self._directory.path.stat().st_mode))
        except FileExistsError:
            return
        log.warning("%s was removed, with what was in it: made again", folder)

    def _write_files(self, snapshot: Snapshot, path: Path) -> None:
        parts = {"optimizer.pt": snapshot.optimizer, "model.pt": snapshot.model, "state.pt": snapshot.state}
        with ThreadPoolExecutor(len(parts) + 2) as threads, _without_crc32():
            digest = threads.submit(weights_digest, snapshot.model)
            files = {
                # torch keeps the option per context, older versions per process: a copied context suits both
                name: threads.submit(copy_context().run, _write_part, path / name, part)
                for name, part in parts.items()
            }
            if self._safetensors:
                files["model.safetensors"] = threads.submit(_write_exchange, path / "model.safetensors", snapshot.model)
        manifest = {
            "format_version": FORMAT_VERSION,
            "algorithm": ALGORITHM,
            **{name: snapshot.state[name] for name in ("step", "samples_seen", "world_size", "config_digest")},
            "weights_digest": digest.result(),
            "score": snapshot.state["score"],
            "time": self._clock(),
            "files": {name: files[name].result() for name in sorted(files)},
        }
        file = ChecksummedFile(path / MANIFEST)
        file.write(encode_manifest(manifest))
        file.close()
        fsync_directory(path)

    def _publish(self, temporary: Path, final: Path) -> None:
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

    def _steps_to_remove(self, sure: int) -> list[int]:
        """What may go, after those that stay in its place were read back: each once, and not the one that is sure."""
        self._read_back.pop(sure, None)
        found = {info.step: info for info in list_checkpoints(self._directory, verify=False)}
        while True:
            steps = self._retention.steps_to_remove(list(found.values()))
            stay = [info for step, info in sorted(found.items(), reverse=True) if info.intact and step not in steps]
            doubtful = [info for info in stay[:ALWAYS_KEPT] if steps and info.step != sure]
            problems = {info.step: self._problem(info) for info in doubtful}
            damaged = {step: problem for step, problem in problems.items() if problem}
            if not damaged:
                return steps
            for step, problem in damaged.items():
                log.warning("%s is not intact (%s): an older one is kept instead", found[step].path, problem)
                found[step] = replace(found[step], intact=False, problem=problem)

    def _problem(self, info: CheckpointInfo) -> str:
        if info.step not in self._read_back:
            self._read_back[info.step] = verify(info.path)
        return self._read_back[info.step]


def _write_part(path: Path, part: Any) -> dict[str, Any]:
    return _written(path, lambda file: torch.save(part, cast(IO[bytes], file)))


def _write_exchange(path: Path, model: Mapping[str, Tensor]) -> dict[str, Any]:
    return _written(path, lambda file: write_safetensors(model, file))


def _written(path: Path, write: Callable[[ChecksummedFile], None]) -> dict[str, Any]:
    file = ChecksummedFile(path)
    try:
        write(file)
    finally:
        file.close()
    return {"bytes": file.bytes, "checksum": file.checksum}


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave out the zip format's own checksums, which take longer than writing and which torch.load doesn't look at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
