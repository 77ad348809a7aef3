"""What a checkpoint holds, as a copy in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.host_copy import HostCopy
from hpctrain.checkpoint.host_memory import pinned_bytes
from hpctrain.checkpoint.names import PlainNames, parameter_names
from hpctrain.run.score import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that decides the future of a run, copied to host memory between two steps.

    Attributes:
        model: plain name -> tensor, tied weights still tied; extra state of modules as they gave it.
        optimizer: its state dict.
        state: the fields of `Head`, ``scaler``, ``parameters`` (names of what the optimizer trains, by its groups),
            ``rng``, ``extra``.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where the run is; what a reader of a checkpoint wants to know first.

    Attributes:
        step: completed steps.
        samples_seen: over all ranks, since the start of the run.
        world_size: of this attempt.
        config_digest: of the run's configuration.
        score: of the evaluation of this step.
    """

    step: int
    samples_seen: int
    world_size: int
    config_digest: str
    score: Score | None = None


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    head: Head,
    rng: Sequence[object] = (),
    into: Snapshot | None = None,
    copied: bool = True,
) -> Snapshot:
    """Copy what a checkpoint holds; not collective, and returns when training may go on.

    Args:
        model: with or without wrappers; its names are saved plain.
        optimizer: between two steps.
        scaler: of fp16; None or a disabled one is saved as None.
        extra: whatever else decides the future: tensors, numbers, strings, dicts, lists, tuples.
        head: where the run is.
        rng: `rng_state` of every rank, in their order.
        into: an earlier snapshot, which nobody reads any more: its buffers are written over and kept, which makes the
            copy several times faster than into fresh memory.
        copied: False leaves tensors in host memory where they are: training must stand still until they are written.

    Raises:
        CheckpointError: something can't be in a checkpoint; its place is named.
    """
    copy = HostCopy(everything=copied)
    snapshot = Snapshot(
        model=_named_tensors(model, copy, into.model if into else {}),
        optimizer=copy.of(optimizer.state_dict(), into.optimizer if into else None, "optimizer"),
        state=copy.of(
            {
                **asdict(head),
                "scaler": scaler.state_dict() or None if scaler is not None else None,
                "parameters": parameter_names(model, optimizer),
                "rng": list(rng),
                "extra": dict(extra or {}),
            },
            into.state if into else None,
            "state",
        ),
    )
    copy.finish()
    return snapshot


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> int:
    """Host memory that a copy takes, as far as tensors tell; nothing is copied. Tied weights count each time.

    Args:
        model: with or without wrappers.
        optimizer: after its first step, or its state isn't there yet.
        extra: as for `capture`.
    """
    return _bytes_of((model.state_dict(), optimizer.state_dict(), extra))


def _named_tensors(model: nn.Module, copy: HostCopy, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = PlainNames(model)
    saved = model.state_dict()
    tensors: OrderedDict[str, Tensor] = OrderedDict()
    for name, value in saved.items():
        key = plain(name)
        tensors[key] = copy.of(value, kept.get(key), f"model[{key!r}]")
    if (versions := getattr(saved, "_metadata", None)) is not None:
        tensors._metadata = {plain(path): dict(entry) for path, entry in versions.items()}  # type: ignore[attr-defined]
    return tensors


def _bytes_of(value: object) -> int:
    if isinstance(value, Tensor):
        return pinned_bytes(value.nbytes) if value.device.type == "cuda" else value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else 0
