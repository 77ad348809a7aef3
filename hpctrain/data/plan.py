"""The batch arithmetic: which positions of an epoch each rank takes at each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.config.resources import check_divisible
from hpctrain.data.keyed_random import IntArray
from hpctrain.errors import ConfigError, TaskError

Number = TypeVar("Number", int, IntArray)


@dataclass(frozen=True)
class BatchPlan:
    """Slices of an epoch: the positions of each step, rank and micro-batch.

    With N samples and global batch size G, step k of an epoch takes the positions [kG, min((k + 1)G, N)), n of them:
    the same at any world size. They make ceil(n / (micro_batch_size * world_size)) micro-batches per rank: n is cut
    into that number x world_size consecutive pieces, as equal as possible, longer ones first, and rank r's a-th
    micro-batch is piece a * world_size + r. In a full step every piece has micro_batch_size positions.

    Only an epoch's last step can be partial, and a rank gets an empty micro-batch only if n < world_size (or
    micro_batch_size is 1).

    Args:
        num_samples: of the training dataset.
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: samples per rank and forward.
        world_size: number of ranks.
        drop_last: leave out the samples after the epoch's last full step.

    Raises:
        ConfigError: the global batch can't be divided, or an epoch has no full step and partial ones are dropped.
        TaskError: the dataset is empty.
    """

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise TaskError("train_dataset() has no samples: expected at least one; check what the task reads")
        check_divisible(self.global_batch_size, self.micro_batch_size, self.world_size)
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise ConfigError(
                "data.drop_last",
                "true",
                f"an epoch would have no step: the training set has {self.num_samples} samples, fewer than "
                f"trainer.global_batch_size={self.global_batch_size}",
                "set data.drop_last=false, or a smaller trainer.global_batch_size",
            )

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches per rank in a full step."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps that one pass over the samples takes, a partial last one included unless it is dropped."""
        full = self.num_samples // self.global_batch_size
        return full if self.drop_last else -(-self.num_samples // self.global_batch_size)

    @cached_property
    def samples_per_epoch(self) -> int:
        """Samples that one epoch uses, over all ranks."""
        return min(self.num_samples, self.steps_per_epoch * self.global_batch_size)

    @cached_property
    def largest_step(self) -> tuple[int, int]:
        """Micro-batches per rank in the largest step, and a bound on their samples.

        Fewer than `accumulation` and micro_batch_size where the dataset is smaller than the global batch.
        """
        samples = min(self.global_batch_size, self.num_samples)
        return self.micro_batches(samples), min(self.micro_batch_size, samples)

    def step_samples(self, step: int) -> int:
        """Samples that a step uses, over all ranks."""
        begin = step % self.steps_per_epoch * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - begin)

    def micro_batches(self, samples: Number) -> Number:
        """Micro-batches per rank in a step of this many samples: the same number on every rank."""
        return -(-samples // (self.micro_batch_size * self.world_size))

    @property
    def ends_with_single_samples(self) -> bool:
        """Whether micro-batches of one sample are only in the last step of an epoch."""
        samples = self.step_samples(self.steps_per_epoch - 1)
        return self.micro_batch_size > 1 and samples < 2 * self.world_size * self.micro_batches(samples)

    def samples_seen(self, step: int) -> int:
        """Samples used, over all ranks and since the start of the run, when this many steps are done."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.samples_per_epoch + steps * self.global_batch_size

    def divisors(self, steps: IntArray, lengths: IntArray) -> NDArray[np.float64]:
        """Return the divisors of micro-batches' mean losses, applied before the backward pass.

        After DDP's mean over the ranks the gradients are then those of the mean over the step's samples. In a full step
        it is exactly `accumulation`; for an empty micro-batch it is infinite, so that its gradients are zero.

        Args:
            steps: int64 of shape [S], counted from 0 over the whole run.
            lengths: int64 of shape [S, M]: samples of each micro-batch, as `pieces` returns them.

        Returns:
            float64 of shape [S, M]; infinite if the step has no such micro-batch.
        """
        _, samples = self._extents(steps)
        return np.where(lengths > 0, samples / (np.maximum(lengths, 1) * self.world_size), np.inf)

    def pieces(self, steps: IntArray, rank: int) -> tuple[IntArray, IntArray]:
        """Positions within the epoch that a rank takes, as starts and lengths of its micro-batches.

        Args:
            steps: int64 of shape [S], counted from 0 over the whole run.
            rank: the rank that takes the pieces.

        Returns:
            Two int64 arrays of shape [S, micro-batches of the largest step]: first position and number of positions, at
            most micro_batch_size; 0 for an empty micro-batch (see the class), -1 if the step has no such micro-batch.
        """
        begins, samples = self._extents(steps)
        micro_batches = self.micro_batches(samples)
        turns = np.arange(self.largest_step[0])
        piece = turns * self.world_size + rank
        length, longer = np.divmod(samples, micro_batches * self.world_size)
        starts = begins + piece * length + np.minimum(piece, longer)
        return starts, np.where(turns < micro_batches, length + (piece < longer), -1)

    def _extents(self, steps: IntArray) -> tuple[IntArray, IntArray]:
        """First position and number of positions of each step, of shape [S, 1]."""
        begins = steps[:, None] % self.steps_per_epoch * self.global_batch_size
        return begins, np.minimum(self.global_batch_size, self.num_samples - begins)
