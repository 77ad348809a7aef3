"""The random number generators of the ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from hpctrain.checkpoint.state import Stateful
from hpctrain.errors import CheckpointError
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.rank.determinism import rank_seed, seed_everything


class GlobalGenerators(Stateful):
    """The random number generators of all ranks, restored after all other parts, which may draw from them.

    Args:
        world: the ranks.
        seed: of the run.
    """

    is_collective: ClassVar[bool] = True

    def __init__(self, world: TrainingWorld, seed: int) -> None:
        self._world = world
        self._seed = seed

    def state(self) -> dict[str, Any]:
        """Return the `rng_state` of each rank, in rank order, at rank zero; collective."""
        return {"rng": self._world.gather(rng_state(self._world.gpus)) or []}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Set the generators as they were; on another number of ranks, or with other degrees of the mesh, seed them."""
        world = self._world
        if saved["world_size"] == world.size and world.share.has_saved_degrees(saved):
            restore_rng(saved["rng"][world.rank], world.gpus)
        else:
            # these ranks draw other numbers in any case; seeds are the same in each attempt, and on ranks that compute
            # layers together
            seed_everything(rank_seed(self._seed + saved["step"], world.share.random_stream))


def rng_state(devices: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Return the states of torch's, NumPy's and Python's global generators, in types that ``weights_only=True`` allows.

    Args:
        devices: CUDA devices of this rank, in order.

    Raises:
        CheckpointError: NumPy's global generator was replaced by one of a different kind.
    """
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    if not isinstance(numpy_state, dict) or numpy_state["bit_generator"] != "MT19937":
        raise CheckpointError(
            "NumPy's global generator is not an MT19937: its state can't be saved; use your own numpy.random.Generator"
        )
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "random": {"version": version, "state": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }


def restore_rng(state: Mapping[str, Any], devices: Sequence[torch.device] = ()) -> None:
    """Set the global generators to a result of `rng_state`; call it last: building models and loaders draws numbers.

    Args:
        state: of this rank.
        devices: as for `rng_state`; surplus devices or states are ignored.
    """
    torch.set_rng_state(state["torch"])
    for device, cuda_state in zip(devices, state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state, device)
    numbers = state["numpy"]
    key = numbers["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numbers["pos"], numbers["has_gauss"], numbers["gauss"]))
    words = state["random"]
    random.setstate((words["version"], tuple(words["state"].tolist()), words["gauss"]))
