"""Which degrees of parallel=mesh fit into memory, for `fit-batch`: tried with one micro-batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpctrain.cli.batch_search import Trial
from hpctrain.config.mesh import MeshShape
from hpctrain.config.root import Config
from hpctrain.phrases import counted

NOTHING_FITS = "not even one sample fits"
LESS_MEMORY = "trainer.activation_checkpointing, precision=bf16, or a smaller model"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedDegree:
    """A shard degree and its trial.

    Attributes:
        shape: of the mesh.
        trial: of one of its ranks.
    """

    shape: MeshShape
    trial: Trial


def with_degrees(config: Config, shape: MeshShape) -> Config:
    """The configuration with all degrees of a mesh, as a trial needs it."""
    parallel = replace(
        config.parallel, replicate_degree=shape.replicate, shard_degree=shape.shard, tensor_degree=shape.tensor
    )
    return replace(config, parallel=parallel)


def sharded_bytes(config: Config, trial: Trial) -> int:
    """Return what the rank of a trial holds in shards: of the model, the gradients and the optimizer."""
    sizes = trial.model_bytes or {}
    # their size doesn't depend on the degree
    whole = ("gradients",) if config.parallel.keep_gradients_whole else ()
    return sum(size or 0 for name, size in sizes.items() if name not in whole)


def fitting_degrees(
    shape: MeshShape,
    known: Trial,
    in_shards: int,
    limit_bytes: int,
    run_trial: Callable[[MeshShape], Trial | None],
    *,
    careful: bool,
) -> Iterator[TriedDegree]:
    """Try other shard degrees for the same number of ranks, down to the first one below the run's that doesn't fit.

    Args:
        shape: of the run.
        known: its trial, with the same micro-batch size.
        in_shards: bytes that one of its ranks holds in shards (`sharded_bytes`).
        limit_bytes: the memory that a trial may use.
        run_trial: tries a mesh; None if its shards can't divide the model.
        careful: don't try what is predicted not to fit (see `BatchSearch`).

    Yields:
        The degrees from the largest to the smallest, that of the run among them.
    """
    product = shape.data_parallel_size
    for degree in (degree for degree in range(product, 0, -1) if product % degree == 0):
        other = replace(shape, replicate=product // degree, shard=degree)
        trial: Trial | None = known
        if degree != shape.shard:
            grown = in_shards * shape.shard // degree - in_shards
            expected = None if known.peak_bytes is None else known.peak_bytes + grown
            if careful and expected is not None and expected > limit_bytes:
                size = known.micro_batch_size
                trial = Trial(micro_batch_size=size, fits=False, peak_bytes=expected, predicted=True)
            else:
                trial = run_trial(other)
        if trial is None:
            continue
        yield TriedDegree(shape=other, trial=trial)
        if not trial.fits and degree < shape.shard:
            return


def advice_on_degrees(shape: MeshShape, degrees: Sequence[TriedDegree]) -> str:
    """Return the smallest shard degree that fits, as it is typed.

    Args:
        shape: of the run.
        degrees: what was tried.
    """
    ranks = counted(shape.num_ranks, "rank")
    fitting = [one for one in degrees if one.trial.fits]
    if not fitting:
        return f"{NOTHING_FITS} with any shard degree of {ranks}: use more ranks, {LESS_MEMORY}"
    smallest = fitting[-1].shape
    tensor = f" parallel.tensor_degree={smallest.tensor}" if smallest.tensor > 1 else ""
    typed = f"parallel.shard_degree={smallest.shard} parallel.replicate_degree={smallest.replicate}{tensor}"
    if not any(one.trial.fits for one in degrees if one.shape == shape):
        return f"{NOTHING_FITS} with parallel.shard_degree={shape.shard}, but it does with parallel=mesh {typed}"
    if smallest == shape:
        return f"parallel.shard_degree={shape.shard}, which the run already uses, is the smallest that fits"
    size = fitting[-1].trial.micro_batch_size
    return f"smallest shard degree that fits, with micro-batches of {size}: parallel=mesh {typed}"
