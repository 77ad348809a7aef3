"""Activation checkpointing: free activations inside modules, and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import ConfigError
from hpctrain.parallel.blocks import outermost_matching

KEY = "trainer.activation_checkpointing"


def checkpoint_activations(model: nn.Module, patterns: Sequence[str], *, compiled: bool = False) -> list[str]:
    """Wrap the forward of every module whose name matches; the names of the weights don't change.

    Dropout draws the same numbers again, and batch norms count a batch once: if the operations are deterministic,
    the weights are equal bit for bit to those of training without it.

    Args:
        model: outside of DDP and not compiled yet.
        patterns: names such as ``blocks.*``; * and ? match within one part of a name, between dots. Modules inside a
            module that matches are left alone.
        compiled: the model will be compiled.

    Returns:
        The names that matched, in the model's order.

    Raises:
        ConfigError: a pattern matches no module, or one without a forward, such as a list; or one with a batch norm in
            a model that will be compiled.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    matching = outermost_matching(modules, patterns, KEY, "matches no module")
    for name, module in matching.items():
        _wrap(name, module, compiled=compiled)
    return list(matching)


def _wrap(name: str, module: nn.Module, *, compiled: bool) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ConfigError(KEY, name, "has no forward: it only holds others", f"write {name}.*")
    forward: Callable[..., Any] = module.forward
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    if norms and compiled:
        # the compiler traces the second pass as well, and leaves out the context that keeps it from counting
        problem = "holds a batch norm, which torch.compile can't compute again without counting it twice"
        raise ConfigError(KEY, name, problem, "leave it out, or set trainer.compile=false")
    options: dict[str, Any] = {"context_fn": lambda: (nullcontext(), statistics_frozen(norms))} if norms else {}

    def recomputed(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        return checkpoint(forward, *arguments, use_reentrant=False, **options, **keywords)

    module.forward = recomputed


@contextmanager
def statistics_frozen(norms: Sequence[nn.modules.batchnorm._NormBase]) -> Iterator[None]:
    """Context manager in which norms compute as usual but don't update their running statistics."""
    originals = [(norm, norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, momentum, count in originals:
            norm.momentum = momentum
            norm._buffers["num_batches_tracked"] = count
