import threading

import pytest
import torch
from torch import nn

from hpctrain.parallel.replica import with_callers_autocast


def in_a_thread(compute, features):
    """As nn.AutocastDataParallel's threads do it (torch/nn/parallel/parallel_apply.py), but on the CPU."""
    enabled, found = torch.is_autocast_enabled("cpu"), []

    def work():
        with torch.autocast("cpu", enabled=enabled):
            found.append(compute(features))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thread_computes_in_the_autocast_of_its_caller(dtype):
    model, features = nn.Linear(4, 3), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=dtype):
        expected = model(features)
        found = in_a_thread(with_callers_autocast(model, "cpu"), features)
        # torch's own thread has its default, whatever the caller's is
        assert in_a_thread(model, features).dtype == torch.bfloat16
    assert found.dtype == expected.dtype == dtype
    assert torch.equal(found, expected)
    assert not torch.is_autocast_enabled("cpu")


def test_without_an_autocast_nothing_is_around_a_replica():
    model = nn.Linear(4, 3)
    assert with_callers_autocast(model, "cpu") is model
    with torch.autocast("cpu", enabled=False):
        assert with_callers_autocast(model, "cpu") is model


def test_all_threads_at_once_have_it():
    model, features, barrier = nn.Linear(4, 3), torch.randn(2, 4), threading.Barrier(4)

    def forward(values):
        barrier.wait(60)
        result = model(values)
        barrier.wait(60)
        return result

    found = []
    with torch.autocast("cpu", dtype=torch.float16):
        compute = with_callers_autocast(forward, "cpu")
        threads = [threading.Thread(target=lambda: found.append(compute(features))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [result.dtype for result in found] == [torch.float16] * 4
