"""Checkpoints on their way back: verified, mapped into memory, restored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.intake import KEPT, MAPPED_FROM_BYTES, Intake
from hpctrain.checkpoint.names import parameter_names
from hpctrain.checkpoint.restore import restore_model, restore_optimizer
from hpctrain.errors import CheckpointDamagedError, CheckpointError
from hpctrain.run.checkpoints import file_checksum, newest_intact, verify
from hpctrain.run.directory import RunDirectory

log = logging.getLogger("hpctrain.checkpoint")


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint whose tensors lie in host memory or are mapped from its files; restore it once, and drop it.

    Attributes:
        path: its directory.
        model: plain name -> tensor.
        optimizer: state dict.
        state: ``step``, ``samples_seen``, ``world_size``, ``config_digest``, ``scaler``, ``parameters``, ``rng``,
            ``extra``.
        gives_away: the optimizer's tensors have memory of their own, which one optimizer may keep.
    """

    path: Path
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    state: Mapping[str, Any]
    gives_away: bool = False

    @property
    def step(self) -> int:
        """Completed steps."""
        return int(self.state["step"])

    @property
    def samples_seen(self) -> int:
        """Over all ranks, since the start of the run."""
        return int(self.state["samples_seen"])

    @property
    def world_size(self) -> int:
        """Of the attempt that wrote it."""
        return int(self.state["world_size"])

    @property
    def config_digest(self) -> str:
        """Of the configuration that it was written under."""
        return str(self.state["config_digest"])

    @property
    def rng(self) -> list[Any]:
        """What `rng_state` gave on each rank of that attempt, in their order."""
        return list(self.state["rng"])

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the trainer added."""
        found: Mapping[str, Any] = self.state["extra"]
        return found

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        changed: Collection[str] = (),
    ) -> None:
        """Put model, optimizer and scaler where they were; not collective. The generators come last, by `restore_rng`.

        Args:
            model: on any device, with or without wrappers; its tensors are copied into.
            optimizer: over the model's parameters; None leaves it out.
            scaler: starts afresh, with a warning, where none was saved.
            changed: options of the optimizer that keep the value which they have here; see `restore_optimizer`.

        Raises:
            CheckpointError: names, shapes, dtypes or options differ; the text lists them, and begins with the path.
        """
        try:
            restore_model(model, self.model)
            if optimizer is not None:
                restore_optimizer(
                    optimizer,
                    self.optimizer,
                    names=parameter_names(model, optimizer),
                    saved_names=self.state["parameters"],
                    changed=changed,
                    keep=self.gives_away,
                )
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        saved = self.state["scaler"]
        if scaler is not None and scaler.is_enabled():
            if saved:
                scaler.load_state_dict(saved)
            else:
                log.warning("%s holds no state of a gradient scaler: the scale starts afresh", self.path)


def load(path: Path, *, verified: bool = False, intake: Intake | None = None) -> LoadedCheckpoint:
    """The checkpoint in the directory ``path``; not collective.

    Checksums are compared first, in one read of the bytes, which leaves them in the page cache for the mapping.

    Args:
        path: its directory.
        verified: somebody did that already, such as another rank.
        intake: reads the optimizer's state into memory, for an optimizer on the CPU to keep; None leaves it in its
            file until it is copied.

    Raises:
        CheckpointDamagedError: it isn't intact.
        CheckpointError: its files match their checksums, and still can't be read.
    """
    if not verified and (problem := verify(path, _checksum(intake))):
        raise CheckpointDamagedError(f"{path} is not intact: {problem}; other checkpoints of the run are beside it")
    parts = {name: _load_file(path / f"{name}.pt") for name in ("model", "optimizer", "state")}
    owned = None
    if intake is not None:
        with _readable(path / KEPT) as file:
            owned = intake.own(file, parts["optimizer"])
    if owned is not None:
        parts["optimizer"] = owned
    return LoadedCheckpoint(path=path, **parts, gives_away=owned is not None)


def _load_file(path: Path) -> Any:
    with _readable(path) as file:
        mapped = file.stat().st_size >= MAPPED_FROM_BYTES
        return torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)


@contextmanager
def _readable(file: Path) -> Iterator[Path]:
    try:
        yield file
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, BadZipFile, UnpicklingError) as error:
        raise CheckpointError(f"{file} can't be loaded: {error}") from error


def _checksum(intake: Intake | None) -> Callable[[Path], str]:
    return file_checksum if intake is None else intake.checksum


def choose_newest(directory: RunDirectory, intake: Intake | None = None) -> Path | None:
    """Where the newest intact checkpoint is; newer ones that are damaged are named in a warning. Not collective.

    Args:
        directory: of the run.
        intake: for `load` to go on with; it keeps what it reads for the comparison.

    Returns:
        None where the run has no checkpoint yet.

    Raises:
        CheckpointDamagedError: there are some, and none is intact.
    """
    found, damaged = newest_intact(directory, lambda path: verify(path, _checksum(intake)))
    named = "; ".join(f"{info.path} ({info.problem})" for info in damaged)
    if found is None:
        if not damaged:
            return None
        raise CheckpointDamagedError(
            f"no checkpoint of the run is intact: {named}. Bring one back from a copy, "
            f"or move {directory.checkpoints} away to start the run from its first step"
        )
    if damaged:
        log.warning("resuming from %s, since what is newer is not intact: %s", found.path, named)
    return found.path
