from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpctrain.data.fetch import TensorBatches
from hpctrain.errors import TaskError
from hpctrain.tasks.task import Task


class Line(Task):
    """The least that a task must say."""

    def train_dataset(self) -> Dataset[Any]:
        return TensorBatches(torch.arange(4.0)[:, None], 2 * torch.arange(4.0)[:, None])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).mean()


def test_train_dataset_and_loss_are_enough() -> None:
    task = Line()
    task.prepare()
    assert task.eval_dataset() is None
    assert (task.metric, task.metric_mode, task.collate_fn) == ("loss", "min", None)
    assert task.derive({"loss": 1.0}) == {}
    sums = task.evaluate(nn.Identity(), (torch.ones(3, 1), torch.zeros(3, 1)))
    assert sums == {"loss": (torch.tensor(3.0), 3)}


def test_a_task_needs_train_dataset_and_loss() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]


def test_the_error_of_a_task_without_a_model_names_the_remedy() -> None:
    with pytest.raises(TaskError, match=r"Line has no model.*Line\.build_model"):
        Line().build_model()


def test_samples_are_counted_in_any_container() -> None:
    task = Line()
    assert task.num_samples({"scale": torch.tensor(2.0), "inputs": [torch.zeros(5, 2)]}) == 5
    with pytest.raises(TaskError, match=r"type list.*Line\.num_samples"):
        task.num_samples(["text", torch.tensor(1.0)])


def test_a_batch_moves_to_the_device_whole() -> None:
    moved = Line().to_device({"inputs": (torch.zeros(2), "name")}, torch.device("meta"))
    assert moved["inputs"][0].device.type == "meta"
    assert moved["inputs"][1] == "name"
