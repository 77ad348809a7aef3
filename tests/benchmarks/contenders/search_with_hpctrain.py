"""The trial as a task of hpctrain, for `-m sweep=optuna`."""

import os

from searched import Searched
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from hpctrain.tasks import Task


class Trial(Task):
    def __init__(self, lengths: str) -> None:
        # each task of the array begins one run
        self.searched = Searched(lengths, number=int(os.environ["SLURM_ARRAY_TASK_ID"]))

    def build_model(self):
        return self.searched.model()

    def train_dataset(self):
        return TensorDataset(*self.searched.samples())

    def eval_dataset(self):
        return TensorDataset(*self.searched.samples())

    def loss(self, model, batch):
        return self.searched.loss(model, *batch)

    def evaluate(self, model, batch):
        count = len(batch[0])
        return {"loss": (mse_loss(model(batch[0]), batch[1]) * count, count)}
