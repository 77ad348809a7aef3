"""What a global batch can be divided into."""

from __future__ import annotations

from hpctrain.errors import ConfigError

SHOWN = 5
"""Numbers of processes that are named where one doesn't work."""


def refuse_indivisible(global_batch_size: int, micro_batch_size: int | None, world_size: int) -> None:
    """Refuse a global batch that the ranks can't divide.

    Args:
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: samples per rank and forward; None: as many as a rank has.
        world_size: number of ranks.

    Raises:
        ConfigError: names the batch sizes that work with this world size, and the world sizes for this batch.
    """
    per_window = world_size * (micro_batch_size or 1)
    if global_batch_size % per_window == 0:
        return
    lower = global_batch_size // per_window * per_window
    sizes = [size for size in (lower, lower + per_window) if size > 0]
    each = f" of micro-batches of {micro_batch_size}" if micro_batch_size else ""
    pieces, rest = divmod(global_batch_size, micro_batch_size or 1)
    fitting = [] if rest else [n for n in range(1, pieces + 1) if pieces % n == 0]
    names = [str(n) for n in sorted(sorted(fitting, key=lambda n: abs(n - world_size))[:SHOWN])]
    worlds = f", or run {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} processes" if names else ""
    raise ConfigError(
        "trainer.global_batch_size",
        global_batch_size,
        f"can't be divided among {world_size} ranks{each}",
        f"set it to {' or '.join(map(str, sizes))}{worlds}",
    )
