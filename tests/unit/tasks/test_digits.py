from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.loader import EvalLoader, TrainLoader
from hpctrain.data.order import ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.errors import ConfigError
from hpctrain.tasks.digits import Digits, read_digits


def test_the_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    table = read_digits()
    assert (table.dtype, table.shape, table.flags.c_contiguous) == (np.float32, (1797, 65), True)
    assert np.array_equal(table[:, :64], pixels)
    assert np.array_equal(table[:, 64], labels)


def test_the_split_is_whole_disjoint_and_always_the_same() -> None:
    task = Digits()
    train, held_out = task.train_dataset().tensors, task.eval_dataset().tensors
    assert len(train[0]) == 1438
    assert len(held_out[0]) == 359
    assert train[0].shape[1:] == (1, 8, 8)
    assert (train[0].dtype, train[1].dtype) == (torch.float32, torch.int64)
    every = torch.cat([train[0], held_out[0]]).flatten(1)
    table = torch.from_numpy(read_digits()[:, :64])
    assert torch.equal((every * 6.017 + 4.884).round().sort(0).values, table.sort(0).values)
    assert abs(every.mean()) < 1e-3
    assert abs(every.std() - 1) < 1e-3
    assert torch.bincount(held_out[1], minlength=10).min() > 20
    assert torch.equal(Digits().eval_dataset().tensors[1], held_out[1])
    assert len(Digits(held_out=0.5).eval_dataset()) == 899


def test_augmentation_shifts_by_a_pixel_at_most() -> None:
    plain, shifted = Digits().train_dataset(), Digits(augment=True).train_dataset()
    torch.manual_seed(0)
    background = plain.tensors[0].min()
    image = plain[3][0]
    seen = set()
    for _ in range(60):
        moved = shifted[3][0]
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                whole = torch.full((1, 10, 10), background.item())
                whole[:, 1 - down : 9 - down, 1 - right : 9 - right] = image
                if torch.allclose(moved, whole[:, 1:9, 1:9]):
                    seen.add((down, right))
    assert len(seen) == 9


@pytest.mark.parametrize("held_out", [0.0, 1.0, -1, 2])
def test_a_share_outside_zero_and_one_is_refused(held_out: float) -> None:
    with pytest.raises(ConfigError, match=r"task\.held_out"):
        Digits(held_out=held_out)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads on busy cores wait for each other twenty times longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("augment", [False, True])
def test_a_few_epochs_reach_97_percent_on_held_out_digits(augment: bool) -> None:
    torch.manual_seed(0)
    task = Digits(augment=augment)
    dataset, model = task.train_dataset(), task.build_model()
    plan = BatchPlan(len(dataset), 64, 64, 1, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = iter(TrainLoader(BatchFetcher(dataset, 0), ShuffledOrder(len(dataset), 0), plan, rank=0))
    for _ in range(4 * plan.steps_per_epoch):
        optimizer.zero_grad()
        task.loss(model, next(batches).batch).backward()
        optimizer.step()
    model.eval()
    loader = EvalLoader(task.eval_dataset(), 200, rank=0, world_size=1)
    with torch.no_grad():
        sums = [task.evaluate(model, batch) for batch in loader.rounds()]
    assert sum(each["accuracy"][1] for each in sums) == 359
    assert sum(int(each["accuracy"][0]) for each in sums) / 359 > 0.97
    assert sum(float(each["loss"][0]) for each in sums) / 359 < 0.15
