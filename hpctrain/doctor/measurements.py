"""What the ranks measured, as figures to compare and as lines to read."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from hpctrain.doctor.rank_answers import RankAnswers
from hpctrain.phrases import brief_time, counted, scaled

SMALL_BYTES = 1024
"""An all-reduce of less shows the latency, a larger one the bandwidth."""


def figures(answers: RankAnswers) -> dict[str, float]:
    """What is compared: seconds, whose names end with `_s`, and rates per second."""
    found: dict[str, float] = {}
    if pairs := answers.pairs:
        found["pair_bandwidth"] = min(pair.bytes_per_s for pair in pairs)
        found["pair_latency_s"] = max(pair.best_latency_s for pair in pairs)
    for one in answers.measured.get("reductions", ()):
        # the largest one comes last
        if one["bytes"] < SMALL_BYTES:
            found[f"{one['backend']}_all_reduce_s"] = one["seconds"]
        else:
            found[f"{one['backend']}_all_reduce_bandwidth"] = one["bytes"] / one["seconds"]
    for name, field in (("device_flops", "flops_per_s"), ("disk_bandwidth", "write_bytes_per_s")):
        if rates := [record[field] for record in answers.records.values() if record.get(field)]:
            found[name] = statistics.median(rates)
    return found


def measured_lines(answers: RankAnswers, known: Mapping[str, float]) -> Iterator[str]:
    """What a reader sees of the measurements.

    Args:
        answers: of the job.
        known: their `figures`.
    """
    for one in answers.measured.get("reductions", ()):
        size, seconds = one["bytes"], one["seconds"]
        rate = f", {scaled(size / seconds, 'B')}/s" if size > SMALL_BYTES else ""
        yield f"all-reduce of {scaled(size, 'B')} over {one['backend']}: {brief_time(seconds)}{rate}"
    if pairs := answers.pairs:
        worst = min(pairs, key=lambda pair: pair.bytes_per_s)
        yield (
            f"{counted(len(pairs), 'pair')} of nodes: at least {scaled(worst.bytes_per_s, 'B')}/s "
            f"({worst.first} and {worst.second}), at most {brief_time(known['pair_latency_s'])} one way"
        )
    if "disk_bandwidth" in known:
        yield f"each node writes {scaled(known['disk_bandwidth'], 'B')}/s to the run directory"
