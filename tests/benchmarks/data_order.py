"""Start and resume of the data order against torch's and torchdata's samplers: seconds and memory, by dataset size.

    python tests/benchmarks/data_order.py

Every line is measured in a fresh process: memory is what its peak grows by, seconds are medians. "start" is from
nothing to the first 64 indices of an epoch, "resume" to the 64 in its middle: DistributedSampler passes over those
before, torchdata's sampler loads a state that was saved there. A table of a billion samples would take 45 GB, so
theirs are left out at that size. torchdata is measured where it is installed (pip install torchdata).
"""

from __future__ import annotations

import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice

SIZES = (10**5, 10**7, 10**9)
LARGEST_TABLE = 10**7
BATCH, EPOCH, REPEATS = 64, 3, 3


class Sized:
    """All that a sampler wants to know of a dataset."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def hpctrain_order(num_samples: int, begin: int) -> Callable[[], object]:
    from hpctrain.data.loader import plan_micro_batches
    from hpctrain.data.order import ShuffledOrder
    from hpctrain.data.plan import BatchPlan

    def indices() -> object:
        plan = BatchPlan(num_samples, BATCH, BATCH, 1, drop_last=False)
        first = EPOCH * plan.steps_per_epoch + begin // BATCH
        return next(plan_micro_batches(plan, ShuffledOrder(num_samples, seed=1), 0, first))

    return indices


def distributed_sampler(num_samples: int, begin: int) -> Callable[[], object]:
    from torch.utils.data.distributed import DistributedSampler

    def indices() -> object:
        sampler = DistributedSampler(Sized(num_samples), num_replicas=1, rank=0, seed=1)  # type: ignore[arg-type]
        sampler.set_epoch(EPOCH)
        return list(islice(sampler, begin, begin + BATCH))

    return indices


def stateful_sampler(num_samples: int, begin: int) -> Callable[[], object]:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def indices() -> object:
        sampler = StatefulDistributedSampler(Sized(num_samples), num_replicas=1, rank=0, seed=1)
        sampler.set_epoch(EPOCH)
        sampler.load_state_dict({"yielded": begin})
        return list(islice(sampler, BATCH))

    return indices


KINDS = {
    "hpctrain": hpctrain_order,
    "DistributedSampler": distributed_sampler,
    "StatefulDistributedSampler": stateful_sampler,
}


def measure(kind: str, num_samples: int, begin: int) -> dict[str, float]:
    """In this process: median seconds, and megabytes that its peak of memory grew by."""
    import torch  # noqa: F401  # its memory belongs to all

    KINDS[kind](1000, 0)()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    indices = KINDS[kind](num_samples, begin)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        indices()
        seconds.append(time.perf_counter() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": statistics.median(seconds), "megabytes": grown / 1024}


def apart(kind: str, num_samples: int, begin: int) -> dict[str, float] | None:
    """`measure` in a process of its own; None where it can't be done."""
    if kind != "hpctrain" and num_samples > LARGEST_TABLE:
        return None
    if kind == "StatefulDistributedSampler" and importlib.util.find_spec("torchdata") is None:
        return None
    command = [sys.executable, "-W", "ignore", __file__, kind, str(num_samples), str(begin)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def main() -> None:
    print(f"{'samples':>13} {'':<7}" + "".join(f" {kind:>34}" for kind in KINDS))
    for num_samples in SIZES:
        for name, begin in (("start", 0), ("resume", num_samples // 2)):
            found = {kind: apart(kind, num_samples, begin) for kind in KINDS}
            ours = found["hpctrain"]
            assert ours is not None
            cells = []
            for each in found.values():
                text = "-"
                if each is not None:
                    ratio = each["seconds"] / ours["seconds"]
                    text = f"{each['seconds'] * 1e3:.3f} ms {each['megabytes']:.1f} MB x {ratio:,.0f}"
                cells.append(f" {text:>34}")
            print(f"{num_samples:13,} {name:<7}" + "".join(cells), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
