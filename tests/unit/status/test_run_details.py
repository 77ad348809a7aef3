from __future__ import annotations

from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.ledger import Attempt
from hpctrain.status.run_details import attempts_table, bottleneck_lines
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState


def test_bottleneck_lines_show_all_figures():
    found = Bottleneck(
        text="waiting for data 38% of the time: data.num_workers 2 -> 6",
        also=("saving 12% of the time: checkpoint.every_steps 10 -> 30",),
        shares={"data": 0.38, "gradient_sync": 0.62},
        slowest_rank=3,
        slowest_host="n2",
        slowest_ratio=1.251,
        samples_per_s_per_device=1234.5,
        mfu=0.412,
        memory_peak_bytes=3_450_000_000,
    )
    assert bottleneck_lines(found) == [
        "training    data 38%  gradient sync 62%",
        "speed       1234 samples/s per device  MFU 41.2%  memory peak 3.45 GB",
        "slowest     rank 3 on n2: 1.25 times the others' own time of a step",
        "bottleneck  waiting for data 38% of the time: data.num_workers 2 -> 6",
        "also        saving 12% of the time: checkpoint.every_steps 10 -> 30",
    ]


def test_a_slowest_rank_that_is_as_fast_as_the_others_is_not_shown():
    found = Bottleneck(text="nothing holds it back", slowest_rank=1, slowest_host="n2", slowest_ratio=1.004)
    assert bottleneck_lines(found) == ["bottleneck  nothing holds it back"]


def test_bottleneck_lines_show_only_what_is_known():
    assert bottleneck_lines(Bottleneck(text="too short to tell")) == ["bottleneck  too short to tell"]


def test_an_attempt_whose_start_was_not_recorded_has_unknown_ranks(tmp_path):
    status = RunStatus(name="a", path=tmp_path, state=RunState.FAILED, attempts=(Attempt(attempt=1),))
    head, line = attempts_table(status, 0.0)
    assert line[head.index("RANKS") :].split() == ["?", "no", "end", "was", "recorded"]
