"""``conf/data``: how samples reach the ranks. Owner: hpctrain.data."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Data:
    """Loading, the same for training and evaluation."""

    num_workers: int | None = None
    """Loading processes per rank; 0: samples are fetched in the rank itself. null: by the data and this rank's cores:
    none for data that comes a batch at a time or as a stream, otherwise all cores but one on a GPU, a quarter of them
    on a CPU, which needs its cores, and never more than 8."""
    prefetch_factor: int = 2
    """Micro-batches that each loading process prepares ahead."""
    pin_memory: bool = True
    """Page-locked host memory for faster copies to a GPU; without effect on a CPU."""
    drop_last: bool = False
    """Leave out the samples that don't fill an epoch's last global batch; false: a smaller last step."""
    shuffle: bool = True
    """A new order per epoch, drawn from seed and epoch; false: the data's own order."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("data.num_workers", self.num_workers, 0)
        require.at_least("data.prefetch_factor", self.prefetch_factor, 1)
