"""Advise which key to change after an error that the configuration can prevent."""

from __future__ import annotations

import re

from hpctrain.attempt.out_of_memory import memory_advice
from hpctrain.config.root import Config
from hpctrain.errors import error_text
from hpctrain.phrases import either

UNUSED_PARAMETERS = "parameters that were not used in producing loss"
"""In DDP's error at the second forward pass, when parameters had no gradient in the first."""
GPU_MEMORY = re.compile(r"(CUDA|HIP) out of memory|(CUDA|HIP) error: out of memory")
HOST_MEMORY = re.compile(
    r"^(_Array)?MemoryError\b|DefaultCPUAllocator: (can't|not enough)|std::bad_alloc|Cannot allocate memory"
)


def advice(error: BaseException, config: Config, world_size: int) -> str:
    """Return which key to change, in one line; empty if the error isn't one of these, or no key is left to change.

    It gives none about a killed DataLoader worker: only the launcher can find out whether the kernel killed it for its
    memory, and gives the advice then.

    Args:
        error: that ended this rank.
        config: of the run.
        world_size: number of ranks.
    """
    text = f"{type(error).__name__}: {error_text(error)}"
    if UNUSED_PARAMETERS in text and not config.parallel.find_unused_parameters:
        return (
            "some parameters did not contribute to the loss: set parallel.find_unused_parameters=true in a new run, or "
            "freeze them"
        )
    if GPU_MEMORY.search(text):
        remedies = _smaller(config, world_size)
        return f"out of GPU memory: {either(remedies)}" if remedies else ""
    if HOST_MEMORY.search(text):
        return f"out of memory: {memory_advice(config)}"
    return ""


def _smaller(config: Config, world_size: int) -> list[str]:
    """Return the settings that save GPU memory and aren't used yet."""
    trainer, found = config.trainer, []
    size = trainer.micro_batch_size or trainer.global_batch_size // world_size
    if size > 1:
        found.append(f"set trainer.micro_batch_size below {size} (`python -m hpctrain fit-batch` finds the largest)")
    if not trainer.activation_checkpointing:
        found.append("set trainer.activation_checkpointing")
    if config.precision.kind in ("fp32", "tf32"):
        found.append("use precision=bf16")
    return found
