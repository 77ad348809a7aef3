"""The order of the samples in an epoch: computed by position, never stored."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.data.keyed_random import IntArray, keyed_bits
from hpctrain.errors import TaskError

_ROUNDS = 10  # those of FF1, NIST SP 800-38G
_ROUNDS_OF_TINY = 24  # halves of a few values mix slowly: with 12 the permutations of 8 samples are visibly uneven
_TINY = 256
_SALT = 0x6F72646572  # "order": keeps these bits apart from others drawn from the same seed
_WEIGHTED_SALT = 0x776569676874  # "weight"
_FMIX_1, _FMIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_SHIFT_16, _SHIFT_13 = np.uint32(16), np.uint32(13)


class Order(Protocol):
    """A function from positions of an epoch to samples; any callable with this signature is one."""

    def __call__(self, epoch: int | IntArray, positions: IntArray) -> IntArray:
        """Sample indices at these positions; a pure function of its arguments.

        Args:
            epoch: one epoch number, or an array of them that broadcasts against the positions.
            positions: int64, any shape, from 0 up to the number of samples.

        Returns:
            int64 sample indices, of the arguments' common shape.
        """


def sequential(epoch: int | IntArray, positions: IntArray) -> IntArray:
    """The samples in index order, in every epoch; an `Order`."""
    return np.broadcast_to(positions, np.broadcast_shapes(np.shape(epoch), positions.shape)).copy()


class ShuffledOrder:
    """A pseudorandom permutation of [0, num_samples) for every (seed, epoch), in constant memory.

    A generalized Feistel network over Z_a x Z_b with a * b >= num_samples, and cycle walking for indices beyond
    num_samples (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002; Luby and Rackoff 1988 for
    the construction). The round function is MurmurHash3's 32-bit finalizer over a half and the round's key.

    Args:
        num_samples: from 1 to 2**62.
        seed: of the run; taken modulo 2**64.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        assert 0 < num_samples <= 1 << 62
        self.num_samples = num_samples
        self.seed = seed
        # a is the largest power of two up to sqrt(num_samples), so fewer than a indices have to walk
        self._low_bits = max(1, (num_samples - 1).bit_length() // 2)
        self._high_size = -(-num_samples >> self._low_bits)
        self._rounds = _ROUNDS_OF_TINY if num_samples <= _TINY else _ROUNDS

    def __call__(self, epoch: int | IntArray, positions: IntArray) -> IntArray:
        """See `Order`."""
        shape = np.broadcast_shapes(np.shape(epoch), positions.shape)
        epochs = np.asarray(epoch, dtype=np.int64)
        turns = np.arange(self._rounds).reshape(-1, *(1 for _ in shape or (1,)))
        keys = list((keyed_bits(self.seed, _SALT, epochs, turns) >> np.uint64(32)).astype(np.uint32))
        indices = self._permute(np.broadcast_to(positions, shape or (1,)), keys)
        beyond = indices >= self.num_samples
        if beyond.any():
            keys = [np.broadcast_to(key, indices.shape)[beyond] for key in keys]
            indices[beyond] = self._walk(indices[beyond], keys)
        return indices.reshape(shape)

    def _walk(self, indices: IntArray, keys: list[npt.NDArray[np.uint32]]) -> IntArray:
        """Permute indices beyond num_samples again, until none is beyond."""
        walkers = np.arange(indices.size)
        while walkers.size:
            indices[walkers] = self._permute(indices[walkers], keys)
            still = indices[walkers] >= self.num_samples
            walkers, keys = walkers[still], [key[still] for key in keys]
        return indices

    def _permute(self, values: IntArray, keys: list[npt.NDArray[np.uint32]]) -> IntArray:
        # fixed-width integers throughout, for the same order on every platform
        low_bits, high_size = np.uint64(self._low_bits), np.uint32(self._high_size)
        mask = np.uint32((1 << self._low_bits) - 1)
        low = (values & np.int64(mask)).astype(np.uint32)
        high = (values >> np.int64(low_bits)).astype(np.uint32)
        for turn in range(0, self._rounds, 2):
            low += _mix(high, keys[turn])
            low &= mask
            high += (_mix(low, keys[turn + 1]) * np.uint64(high_size) >> np.uint64(32)).astype(np.uint32)
            np.minimum(high, high - high_size, out=high)
        return (high.astype(np.int64) << np.int64(low_bits)) | low


class WeightedOrder:
    """Samples drawn with replacement, in proportion to their weights.

    An epoch has as many positions as the dataset has samples. The draw at a position depends only on (seed, epoch,
    position), so that it is the same at any world size and after any resume: inversion sampling, with a keyed uniform
    number that is looked up in the cumulative weights.

    Args:
        weights: one per sample, float of shape [num_samples], finite, none negative, not all zero.
        seed: of the run.

    Raises:
        TaskError: the weights violate one of these conditions.

    Example:
        A task that draws each class equally often::

            class Balanced(Task):
                def order(self, num_samples, seed):
                    counts = numpy.bincount(self.labels)
                    return WeightedOrder(1 / counts[self.labels], seed)
    """

    def __init__(self, weights: npt.ArrayLike, seed: int) -> None:
        values = np.asarray(weights, dtype=np.float64)
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise TaskError(
                f"expected one finite weight per sample, none negative, not all zero; got shape {values.shape}, from "
                f"{values.min(initial=0)} to {values.max(initial=0)}"
            )
        self.num_samples = len(values)
        self.seed = seed
        with np.errstate(over="ignore"):
            total = values.sum()
        if np.isinf(total):
            values = values / values.max()
            total = values.sum()
        self._edges = np.cumsum(values / total)
        # a sample of weight 0 at the end is never drawn, although the sum may be rounded down
        self._edges[np.flatnonzero(values)[-1] :] = 1.0

    def __call__(self, epoch: int | IntArray, positions: IntArray) -> IntArray:
        """See `Order`."""
        shape = np.broadcast_shapes(np.shape(epoch), positions.shape)
        epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), shape)
        bits = keyed_bits(self.seed, _WEIGHTED_SALT, epochs, np.broadcast_to(positions, shape))
        uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.searchsorted(self._edges, uniform, side="right").astype(np.int64)


def _mix(half: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    word = half ^ key
    word ^= word >> _SHIFT_16
    word *= _FMIX_1
    word ^= word >> _SHIFT_13
    word *= _FMIX_2
    word ^= word >> _SHIFT_16
    return word


POOL_BATCHES = 50
"""Batches in a pool: as many as Hugging Face's length-grouped sampler takes."""

_BUCKET_SALT = 0x6275636B6574  # "bucket": keeps these bits apart from others drawn from the same seed


class BucketOrder:
    """Each sample once per epoch, in batches of samples of similar lengths, so that little is padded.

    A pool of about `pool_batches` batches is taken from the epoch's random permutation, sorted by length, cut into
    batches, and these are permuted. So a batch has the samples of a random range of lengths, and the batches of an
    epoch come in a random order. The order depends only on (seed, epoch), not on the number of ranks: a step has the
    same samples at any world size. Ranks get samples of nearly the same length, so none waits long for another. If an
    epoch's last batch is smaller, its range of lengths is random, too.

    Memory: the lengths, and 16 bytes per sample of a pool.

    Args:
        lengths: of each sample, in any unit: numbers of shape [num_samples].
        seed: of the run.
        batch_size: consecutive positions with similar lengths: trainer.global_batch_size.
        pool_batches: batches that are sorted together; fewer: more random batches with more padding.

    Raises:
        TaskError: the lengths aren't one number per sample, or a size is less than 1.

    Example:
        A task whose `collate_fn` pads to the longest sample of a batch::

            class Sentences(Task):
                def order(self, num_samples, seed):
                    return BucketOrder(self.lengths, seed, batch_size=64)
    """

    def __init__(self, lengths: npt.ArrayLike, seed: int, *, batch_size: int, pool_batches: int = POOL_BATCHES) -> None:
        self._lengths = np.asarray(lengths)
        if self._lengths.ndim != 1 or not len(self._lengths) or self._lengths.dtype.kind not in "iuf":
            raise TaskError(
                f"expected one length per sample, got {self._lengths.dtype} of shape {list(self._lengths.shape)}"
            )
        if batch_size < 1 or pool_batches < 1:
            raise TaskError(f"expected sizes of at least 1, got batch_size={batch_size}, pool_batches={pool_batches}")
        self.num_samples = len(self._lengths)
        self._batch_size = batch_size
        self._num_batches = -(-self.num_samples // batch_size)
        # of equal sizes: a small last pool would mix all lengths in its batches
        self._num_pools = max(1, round(self._num_batches / pool_batches))
        self._seed = seed
        self._shuffled = ShuffledOrder(self.num_samples, seed)
        self._newest_pool: tuple[tuple[int, int], IntArray] | None = None

    def __call__(self, epoch: int | IntArray, positions: IntArray) -> IntArray:
        """See `Order`."""
        shape = np.broadcast_shapes(np.shape(epoch), positions.shape)
        epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), shape).ravel()
        places = np.broadcast_to(positions, shape).ravel()
        pools = ((places // self._batch_size + 1) * self._num_pools - 1) // self._num_batches
        indices = np.empty(places.shape, dtype=np.int64)
        for number, pool in np.unique(np.stack((epochs, pools)), axis=1).T.tolist():
            here = (epochs == number) & (pools == pool)
            indices[here] = self._pool(number, pool)[places[here] - self._begin(pool)]
        return indices.reshape(shape)

    def _begin(self, pool: int) -> int:
        batches = pool * self._num_batches // self._num_pools
        return min(batches * self._batch_size, self.num_samples)

    def _pool(self, epoch: int, pool: int) -> IntArray:
        """The samples of a pool, in the order of their positions."""
        # positions come in order, so the next call mostly needs the same pool
        if self._newest_pool is None or self._newest_pool[0] != (epoch, pool):
            self._newest_pool = (epoch, pool), self._build_pool(epoch, pool)
        return self._newest_pool[1]

    def _build_pool(self, epoch: int, pool: int) -> IntArray:
        size = self._batch_size
        samples = self._shuffled(epoch, np.arange(self._begin(pool), self._begin(pool + 1)))
        # stable: samples of one length stay in random order
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        full, remainder = divmod(len(samples), size)
        turns = keyed_bits(self._seed, _BUCKET_SALT, epoch, pool, np.arange(full + 1))
        if remainder:
            # the incomplete batch has to be last, but its lengths should be as random as those of the others
            cut = int(turns[full] % np.uint64(full + 1)) * size
            samples = np.concatenate((samples[:cut], samples[cut + remainder :], samples[cut : cut + remainder]))
        batches = samples[: full * size].reshape(full, size)[np.argsort(turns[:full], kind="stable")]
        return np.concatenate((batches.ravel(), samples[full * size :]))
