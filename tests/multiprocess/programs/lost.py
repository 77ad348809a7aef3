"""A task whose GPU is lost in a call of the loss or of the evaluation: nothing that it used may be freed from then on.

python lost.py FOLDER: trains it in this process until it fails, drops all that it has of the training, and ends.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import get_worker_info

import hpctrain
from hpctrain.data import TensorBatches
from tests.multiprocess.programs.trial import Trial, table

ASSERTED = (
    "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda for more"
)
"""The message of torch 2.13 for a label out of range, but for its advice."""


class Used:
    """A part of a batch that the GPU has used: to free it after the error ends the process, as torch's tensors do."""

    is_lost = False

    def __del__(self):
        if Used.is_lost:
            os.abort()


class Batches(TensorBatches):
    """Batches that end with something that the GPU has used; a slow loading process lets the others run ahead."""

    def get_batch(self, indices):
        worker = get_worker_info()
        if worker is not None and worker.id == 0:
            time.sleep(0.3)
        return (*super().get_batch(indices), Used())


class Lost(Trial):
    """The trial, with one more action, `fault`.

    It also happens in the call of the evaluation with the number `evaluation`, and from so many `samples` on; never if
    the task is `healthy`.
    """

    def __init__(self, evaluation=None, samples=None, healthy=False, **options):
        super().__init__(**options)
        self.evaluation, self.samples, self.evaluations = evaluation, samples, 0
        if healthy:
            self.acts = {}
        self.pool = ThreadPoolExecutor(1)  # whose thread waits for work until Python's own exit
        self.pool.submit(int)

    def train_dataset(self):
        return Batches(*table(self.sizes[0]))

    def eval_dataset(self):
        return Batches(*table(self.sizes[1], seed=2))

    def loss(self, model, batch):
        if self.samples is not None and len(batch[0]) >= self.samples:
            self._act("fault")
        return super().loss(model, batch[:3])

    def evaluate(self, model, batch):
        self.evaluations += 1
        if self.evaluations == self.evaluation:
            self._act("fault")
        return super().evaluate(model, batch[:3])

    def _act(self, action):
        if action != "fault":
            super()._act(action)
            return
        Used.is_lost = True
        raise torch.AcceleratorError(ASSERTED)


def main(folder):
    words = ["trainer.max_steps=6", "trainer.global_batch_size=8", "data.num_workers=2", f"run_dir={folder}/run"]
    try:
        hpctrain.fit(hpctrain.compose(words, task=Lost))
    except RuntimeError as error:
        print("got", str(error).partition("\n")[0])
    gc.collect()
    (attempt,) = hpctrain.Run(f"{folder}/run").status().attempts
    print(attempt.reason, attempt.end_step)


if __name__ == "__main__":
    main(sys.argv[1])
