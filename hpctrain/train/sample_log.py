"""An account of the data order: which samples every step really took."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from hpctrain.data.micro_batch import MicroBatch


def recorded(
    micro_batches: Generator[MicroBatch, None, None], file: Path, start_step: int
) -> Generator[MicroBatch, None, None]:
    """The same micro-batches; each step's samples are written down as they are handed out.

    A line is ``{"step": 20, "samples": [5, 811]}``: one rank's samples, in the order in which it took them, of the step
    that metrics.jsonl calls so. Where an attempt does a step again, the last line counts.

    Args:
        micro_batches: of one rank, from the step after ``start_step`` on.
        file: appended to.
        start_step: completed steps.
    """
    step, samples = start_step + 1, list[int]()
    with closing(micro_batches), file.open("a", buffering=1) as lines:
        for micro_batch in micro_batches:
            samples += micro_batch.indices[: micro_batch.num_samples].tolist()
            if micro_batch.is_last:
                lines.write(json.dumps({"step": step, "samples": samples}) + "\n")
                step, samples = step + 1, []
            yield micro_batch
