from __future__ import annotations

import torch

from hpctrain.data.prefetch import prefetched


def test_on_a_cpu_they_are_what_they_were():
    micro_batches = (number for number in range(3))
    assert prefetched(micro_batches, lambda batch: 1 / 0, torch.device("cpu")) is micro_batches
