"""``conf/data``: how samples reach the ranks. Owner: hpctrain.data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Data(require.Checked):
    """Loading, the same for training and evaluation."""

    num_workers: Annotated[int | None, require.at_least(0, at_most=1024)] = None
    """Loading processes per rank; 0: the rank fetches samples itself. null: 0 for data that comes in batches or as a
    stream; otherwise all of the rank's cores but one with a GPU, a quarter of them on a CPU, and at most 8."""
    prefetch_factor: Annotated[int, require.at_least(1, at_most=65_536)] = 2
    """Micro-batches that each loading process prepares in advance."""
    pin_memory: bool = True
    """Use page-locked host memory, for faster copies to a GPU; no effect on a CPU."""
    drop_last: bool = False
    """Drop the last samples of an epoch that don't fill a global batch; false: make the last step smaller."""
    shuffle: bool = True
    """Shuffle each epoch, from seed and epoch; false: keep the data's order."""
