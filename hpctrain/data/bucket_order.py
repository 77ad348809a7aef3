"""An order whose batches have samples of similar lengths."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpctrain.data.keyed_random import IntArray, keyed_bits
from hpctrain.data.order import ShuffledOrder
from hpctrain.errors import TaskError

POOL_BATCHES = 50
"""Batches in a pool: as many as Hugging Face's length-grouped sampler takes."""

_SALT = 0x6275636B6574  # "bucket": keeps these bits apart from others drawn from the same seed


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
        self._last: tuple[tuple[int, int], IntArray] | None = None

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
        if self._last is None or self._last[0] != (epoch, pool):
            self._last = (epoch, pool), self._made(epoch, pool)
        return self._last[1]

    def _made(self, epoch: int, pool: int) -> IntArray:
        size = self._batch_size
        samples = self._shuffled(epoch, np.arange(self._begin(pool), self._begin(pool + 1)))
        # stable: samples of one length stay in random order
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        full, rest = divmod(len(samples), size)
        turns = keyed_bits(self._seed, _SALT, epoch, pool, np.arange(full + 1))
        if rest:
            # the incomplete batch has to be last, but its lengths should be as random as those of the others
            cut = int(turns[full] % np.uint64(full + 1)) * size
            samples = np.concatenate((samples[:cut], samples[cut + rest :], samples[cut : cut + rest]))
        batches = samples[: full * size].reshape(full, size)[np.argsort(turns[:full], kind="stable")]
        return np.concatenate((batches.ravel(), samples[full * size :]))
