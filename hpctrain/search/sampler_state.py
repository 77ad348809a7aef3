"""The state of one of Optuna's samplers as JSON, from which another process continues to draw."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

RANDOM = "random"
KERNELS = "kernels"
KERNEL_FIELDS = ("inverse_squared_lengthscales", "kernel_scale", "noise_var")
"""What GPSampler (Optuna 5.0) starts from when it fits the next kernel; tensors of float64."""
_KEY = 624
"""Words of the state of a Mersenne Twister (MT19937)."""
KERNEL_LISTS = ("_gprs_cache_list", "_constraints_gprs_cache_list")


def sampler_state(sampler: object) -> dict[str, Any]:
    """Return what changes in a sampler as it draws: its random numbers, and the kernels of GPSampler.

    A pickle would do the same, and would let whoever can write the sweep's folder execute code.
    """
    return {
        RANDOM: {path: _encoded(lazy.rng) for path, lazy in _random_states(sampler)},
        KERNELS: {name: _kernels(getattr(sampler, name)) for name in KERNEL_LISTS if getattr(sampler, name, None)},
    }


def restore_sampler(sampler: object, state: dict[str, Any]) -> None:
    """Restore the result of `sampler_state` in a new sampler of the same kind and arguments.

    Raises:
        KeyError, TypeError, ValueError: the state is that of another sampler, or damaged.
    """
    for path, lazy in _random_states(sampler):
        _decode_into(lazy.rng, state[RANDOM][path])
    for name, kernels in state[KERNELS].items():
        import torch

        restored = [
            SimpleNamespace(**{field: torch.tensor(one[field], dtype=torch.float64) for field in KERNEL_FIELDS})
            for one in kernels
        ]
        setattr(sampler, name, restored)


def _random_states(sampler: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Find the random states of a sampler and of the samplers inside it, by the names of the attributes."""
    from optuna.samplers import BaseSampler
    from optuna.samplers._lazy_random_state import LazyRandomState

    for name, value in sorted(vars(sampler).items()):
        if isinstance(value, LazyRandomState):
            yield f"{path}{name}", value
        elif isinstance(value, BaseSampler):
            yield from _random_states(value, f"{path}{name}.")


def _encoded(rng: Any) -> dict[str, Any]:
    state = rng.get_state(legacy=False)
    key = base64.b64encode(state["state"]["key"].astype("<u4").tobytes()).decode()
    return {
        "key": key,
        "pos": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _decode_into(rng: Any, state: dict[str, Any]) -> None:
    import numpy as np

    key = np.frombuffer(base64.b64decode(state["key"]), dtype="<u4")
    # numpy doesn't check the position, and would read beyond the key
    if len(key) != _KEY or not 0 <= state["pos"] <= _KEY:
        raise ValueError("not the state of a Mersenne Twister")
    rng.set_state(("MT19937", key, state["pos"], state["has_gauss"], state["gauss"]))


def _kernels(kernels: Any) -> list[dict[str, Any]]:
    return [{field: getattr(one, field).tolist() for field in KERNEL_FIELDS} for one in kernels]
