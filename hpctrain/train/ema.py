"""An exponential moving average of the weights (Polyak & Juditsky, 1992; as `torch.optim.swa_utils` computes it)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.restore import copy_saved
from hpctrain.checkpoint.state import Stateful
from hpctrain.errors import CheckpointError
from hpctrain.parallel.local_part import local_parts
from hpctrain.train.precision import MasterWeights


class Ema(Stateful):
    """Averages the trainable parameters after each step; buffers stay those of the live model.

    Every rank computes the same average from the same weights, so nothing here is collective.

    Args:
        model: the module itself, outside of DDP.
        decay: the share of the average that stays at each update, in [0, 1).
        master: publishes exchanged weights to the half copy of the model; None if there is no copy.
        trained: the parameters to average; None for those that require a gradient now.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        master: MasterWeights | None = None,
        trained: Iterable[Tensor] | None = None,
    ) -> None:
        chosen = None if trained is None else {id(parameter) for parameter in trained}
        named_parameters = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if (parameter.requires_grad if chosen is None else id(parameter) in chosen)
        ]
        self._names = [name for name, _ in named_parameters]
        self._parameters: list[Tensor] = [parameter for _, parameter in named_parameters]
        # fp32 at least: half precision would round away the small share of an update
        wide = [torch.promote_types(parameter.dtype, torch.float32) for parameter in self._parameters]
        self._averages = [
            parameter.detach().to(dtype, copy=True) for parameter, dtype in zip(self._parameters, wide, strict=True)
        ]
        # every rank averages the parts of parameters that it holds
        self._local_parameters = local_parts(tensor for tensor in self._parameters if not tensor.is_meta)
        self._local_averages = local_parts(tensor for tensor in self._averages if not tensor.is_meta)
        self._widens = any(parameter.dtype != dtype for parameter, dtype in zip(self._parameters, wide, strict=True))
        self._master = master
        self._weight = 1.0 - decay

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights of one more update."""
        weights, averages = self._local_parameters, self._local_averages
        if self._widens:
            weights = [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]
        # one call for all: a loop over the parameters would cost a kernel's launch for each
        if averages:
            torch._foreach_lerp_(averages, weights, self._weight)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the present weights."""
        if self._local_averages:
            torch._foreach_copy_(self._local_averages, self._local_parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that gives the model the averaged weights, and afterwards its own again, bit for bit."""
        with torch.no_grad():
            live_weights = [parameter.detach().clone() for parameter in self._local_parameters]
            self._set(self._local_averages)
            try:
                yield
            finally:
                self._set(live_weights)

    def _set(self, weights: list[Tensor]) -> None:
        if weights:
            torch._foreach_copy_(self._local_parameters, weights)
        if self._master is not None:
            self._master.publish()

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages by parameter name, not copied."""
        return dict(zip(self._names, self._averages, strict=True))

    def state(self) -> dict[str, Any]:
        """Return the averages."""
        return {"ema": self.averages}

    @torch.no_grad()
    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continue from saved averages.

        Raises:
            CheckpointError: the averages belong to another model.
        """
        averages = saved.get("ema", {})
        if averages.keys() != set(self._names):
            raise CheckpointError(
                f"the checkpoint's moving average has {len(averages)} parameters, the model {len(self._names)}, "
                "or they have other names; frozen ones aren't averaged: resume with the model, "
                "optimizer.groups and trainer.ema_decay that were saved"
            )
        for name, average in zip(self._names, self._averages, strict=True):
            copy_saved(average, averages[name])
