"""Where the wall time went, as a waterfall, with the effective training time ratio."""

from __future__ import annotations

from dataclasses import asdict

from hpctrain.phrases import duration
from hpctrain.report.bar_rows import Part, waterfall
from hpctrain.report.markup import Markup, element, joined
from hpctrain.status.accounting import WallTime

KINDS = {
    "queued": ("queued", "in SLURM's queue, or between attempts"),
    "starting": ("starting", "until the first new step"),
    "training": ("working", "steps that were kept"),
    "evaluating": ("evaluating", "of steps that were kept"),
    "saving": ("saving", "training waited for a checkpoint"),
    "lost": ("lost", "steps that were repeated, and time until a kill"),
    "stopping": ("stopping", "from the last step or save to the end"),
}
"""The parts of the wall time: class of the bar, and meaning."""


def time_chart(spent: WallTime, *, with_ratio: bool = True) -> Markup:
    """Draw the parts of the wall time below each other; each begins where the one before it ends.

    Args:
        spent: of one run, or of several together.
        with_ratio: whether steps are known: without them, repeated work can't be told from other work.
    """
    whole = spent.total_s
    if whole <= 0:
        return element("p", "No time has passed yet.", class_="faint")
    parts = []
    for field, seconds in asdict(spent).items():
        name = field.removesuffix("_s")
        kind, meaning = KINDS[name]
        if seconds > 0:
            took = duration(seconds) if seconds >= 10 else f"{seconds:.1f} s"
            share = seconds / whole
            parts.append(Part(name=name, about=meaning, share=share, result=f"{took}, {share:.1%}", kind=kind))
    drawn = [waterfall(parts)]
    if with_ratio and spent.ratio is not None:
        text = (
            f" of {duration(whole)}: the share of the wall time, the queue included, in which training and evaluation "
            "were done that the run kept."
        )
        drawn.insert(0, element("p", element("b", f"Effective training time ratio {spent.ratio:.2f}"), text))
    return joined(drawn)
