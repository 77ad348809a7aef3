"""Batches that are copied to the GPU while it computes: they overlap, and hold what they held on the CPU."""

from __future__ import annotations

from collections import deque
from itertools import islice

import pytest
import torch

from hpctrain.data import TensorBatches
from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import CopyInBackground, MoveOnDemand, map_tensors
from hpctrain.data.order import ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.data.workers import Workers
from tests.gpu.programs.gpu_tasks import ON_CPU, spin

pytestmark = pytest.mark.gpu
SAMPLES, WIDTH, MICRO = 256, 65_536, 32
"""A micro-batch has 8 MB."""
PLAN = BatchPlan(SAMPLES, global_batch_size=2 * MICRO, micro_batch_size=MICRO, world_size=1, drop_last=True)
BATCHES = 40
LATE_S, LONG_S = 0.01, 1.5
MB = 1 << 20
PIECES_MB = [30, 60, 90, 120, 150, 45, 75, 105, 135]
"""Mostly larger than what is free by then, so that the allocator has to give memory back, and to ask for more."""


@pytest.fixture
def transfer(device):
    kind = MoveOnDemand if ON_CPU else CopyInBackground
    return kind(lambda batch, where: map_tensors(lambda one: one.to(where, non_blocking=True), batch), device)


@pytest.fixture(scope="module")
def samples():
    draws = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31 - 1, (SAMPLES, WIDTH), generator=draws, dtype=torch.int32)


@pytest.fixture
def batches(samples):
    """Micro-batches by number of loading processes: on the device with a transfer, else on the CPU."""
    opened = []

    def read(num_workers, transfer=None):
        workers = Workers(num_workers, pin_memory=transfer is not None and not ON_CPU)
        loader = TrainLoader(
            BatchFetcher(TensorBatches(samples), 1), ShuffledOrder(SAMPLES, 1), PLAN, rank=0, workers=workers
        )
        found = loader.micro_batches(transfer)
        opened.append(found)
        return (micro_batch.batch[0] for micro_batch in islice(found, BATCHES))

    yield read
    for each in opened:
        each.close()


def checksums(batch):
    """A sum that overflows nowhere and depends on the order, for each sample."""
    places = torch.arange(1, WIDTH + 1, device=batch.device)
    return (batch.long() * places).sum(1)


@pytest.fixture(scope="module")
def expected(samples):
    """The checksums of the samples, on the CPU."""
    return checksums(samples)


@pytest.mark.core
@pytest.mark.needs_cuda("streams")
def test_a_copy_does_not_wait_for_what_the_gpu_computes(device, transfer):
    given = torch.randn(1000, 1000).pin_memory(), {"labels": torch.arange(1000).pin_memory()}
    # once before, so that the allocator has the memory: asking the driver for it may wait
    transfer.finish(transfer.begin(given))
    torch.cuda.synchronize()
    spin(LONG_S)
    computing = torch.cuda.current_stream(device).record_event()
    begun = transfer.begin(given)
    _, copied = begun
    copied.synchronize()
    assert not computing.query()
    copy, labels = transfer.finish(begun)
    assert not computing.query()
    assert torch.equal(copy.cpu(), given[0])
    assert torch.equal(labels["labels"].cpu(), given[1]["labels"])
    assert computing.query()


@pytest.mark.needs_cuda("streams")
def test_computing_waits_for_a_copy(device, transfer):
    given = torch.arange(50 * MB, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(transfer._copies):
        spin(LATE_S)
    copy = transfer.finish(transfer.begin(given))
    assert torch.equal((copy + 1).cpu(), given + 1)


@pytest.mark.core
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_their_samples_while_the_gpu_is_late(num_workers, batches, transfer, expected):
    """The host is many batches ahead: each is used after it was dropped here, and after its successors were copied."""
    found = []
    for batch in batches(num_workers, transfer):
        spin(LATE_S)
        found.append(checksums(batch))
        del batch
    order = torch.cat([places_of(batch, expected) for batch in batches(0)])
    assert torch.equal(torch.cat(found).cpu(), expected[order])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_tensors_that_a_task_keeps_hold_their_samples(num_workers, batches, transfer, expected):
    """Each is used after its successors were copied, and dropped on the host before that."""
    found, kept = [], deque()
    for batch in batches(num_workers, transfer):
        kept.append(batch.view(-1))
        del batch
        spin(LATE_S)
        if len(kept) > 3:
            found.append(checksums(kept.popleft().view(MICRO, WIDTH)))
    found += [checksums(late.view(MICRO, WIDTH)) for late in kept]
    kept.clear()
    order = torch.cat([places_of(batch, expected) for batch in batches(0)])
    assert torch.equal(torch.cat(found).cpu(), expected[order])


@pytest.mark.needs_cuda("the allocator of a GPU")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_their_samples_while_the_allocator_is_under_pressure(
    num_workers, batches, transfer, expected, device
):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    room = torch.cuda.memory_reserved(device) + 400 * MB
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
    found = []
    torch.cuda.set_per_process_memory_fraction(room / total, device)
    try:
        for number, batch in enumerate(batches(num_workers, transfer)):
            spin(LATE_S / 10)
            piece = torch.empty(PIECES_MB[number % len(PIECES_MB)] * MB, dtype=torch.uint8, device=device)
            piece.fill_(number)
            del piece
            found.append(checksums(batch))
            del batch
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert torch.cuda.memory_stats(device)["num_alloc_retries"] > retries
    order = torch.cat([places_of(batch, expected) for batch in batches(0)])
    assert torch.equal(torch.cat(found).cpu(), expected[order])


def places_of(batch, expected):
    """Which samples a batch on the CPU has, by their checksums."""
    return (checksums(batch)[:, None] == expected).nonzero()[:, 1]
