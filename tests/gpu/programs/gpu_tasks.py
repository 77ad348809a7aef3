"""Tasks that harm or occupy the GPU at a call of the loss, as `Trial` does to its process, and one that measures it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_weight
from torch.utils.data import Dataset
from trial import CLASSES, Trial

from hpctrain.data import TensorBatches

DEVICE = "cuda"
FEW_STEPS = (
    "task=custom",
    "task._target_=gpu_tasks.Pictures",
    "trainer.global_batch_size=16",
    "trainer.max_steps=14",
    "trainer.max_epochs=null",
    "logger.every_steps=1",
    "checkpoint.every_steps=1",
)
"""Words of a run that logs and saves each of its few steps."""
CYCLES_PER_S = 2e9
"""Clock rate that no GPU exceeds for long: so many cycles take at least a second."""
SHARE = 0.05
"""Share of the GPU's memory that `exhaust` may take: other tests use the rest."""


def spin(seconds):
    """Have the GPU compute for so long, without waiting for it."""
    torch.cuda._sleep(round(seconds * CYCLES_PER_S))


def index_out_of_range():
    """Fail on the device; the host learns of it when it next waits."""
    torch.zeros(4, device=DEVICE)[torch.tensor([7], device=DEVICE)]


def exhaust():
    """Allocate until the GPU has no more memory for this process."""
    torch.cuda.set_per_process_memory_fraction(SHARE)
    eaten = []
    while True:
        eaten.append(torch.empty(2**28, dtype=torch.uint8, device=DEVICE))


def pictures(num_samples, seed=1):
    """Pixels, labels and numbers of the samples; a label doesn't change if its picture is turned upside down."""
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randn(num_samples, 1, 8, 8, generator=draws)
    return pixels, pixels[:, 0].sum(1)[:, :CLASSES].argmax(1), torch.arange(num_samples)


class Augmented(Dataset):
    """Turns pictures upside down, and disturbs them.

    LOADED_BY names a folder, in which each process that makes a sample leaves a file with its process id as the name.
    """

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        if "LOADED_BY" in os.environ:
            Path(os.environ["LOADED_BY"], str(os.getpid())).touch()
        pixels, label, number = (tensor[index] for tensor in self.tensors)
        turned = pixels.flip(1) if torch.rand(()) < 0.5 else pixels
        return turned + 0.1 * torch.randn(pixels.shape), label, number


class Pictures(Trial):
    """The trial with convolutions. TRIAL_ACT also knows these actions.

    `spin_SECONDS` has the GPU compute for so long; `stand` makes the process sleep; `fault` is an index out of range on
    the device; `exhaust` takes more memory than there is. TRIAL_ACTED names a file that is touched before any action.
    """

    def build_model(self):
        width = self.options["width"]
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(self.options["dropout"]),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * width, CLASSES),
        )

    def train_dataset(self):
        return (Augmented if self.noise else TensorBatches)(*pictures(self.sizes[0]))

    def eval_dataset(self):
        return TensorBatches(*pictures(self.sizes[1], seed=2)) if self.sizes[1] else None

    def _act(self, action):
        if "TRIAL_ACTED" in os.environ:
            Path(os.environ["TRIAL_ACTED"]).touch()
        if action.startswith("spin_"):
            spin(float(action.removeprefix("spin_")))
        elif action == "stand":
            time.sleep(600)
        elif action == "fault":
            index_out_of_range()
        elif action == "exhaust":
            exhaust()
        else:
            super()._act(action)


class Mislabelled(Pictures):
    """One of the labels is out of range: the last one of `place`, `train` or `eval`."""

    def __init__(self, place="train", **options):
        super().__init__(**options)
        self.place = place

    def train_dataset(self):
        return self._spoilt(super().train_dataset(), "train")

    def eval_dataset(self):
        return self._spoilt(super().eval_dataset(), "eval")

    def _spoilt(self, dataset, place):
        if place == self.place:
            dataset.tensors[1][-1] = CLASSES
        return dataset


class MislabelledAndMoved(Mislabelled):
    """The same, and moves its batches itself."""

    def to_device(self, batch, device):
        return super().to_device(batch, device)


class Numerics(Pictures):
    """Logs how far the run's own fp32 operations are from those in float64, relative to their results."""

    def loss(self, model, batch):
        with torch.no_grad():
            errors = {
                "matmul_error": relative_error(torch.matmul, (512, 768), (768, 640)),
                "convolution_error": relative_error(
                    lambda images, weight: conv2d(images, weight, padding=1), (8, 64, 32, 32), (96, 64, 3, 3)
                ),
                "convolution_gradient_error": relative_error(
                    lambda images, gradient: conv2d_weight(images, (96, 64, 3, 3), gradient, padding=1),
                    (8, 64, 32, 32),
                    (8, 96, 32, 32),
                ),
            }
        return {"loss": super().loss(model, batch), **errors}


def relative_error(compute, *shapes):
    """The 2-norm of the difference from float64, over that of the result."""
    draws = torch.Generator(DEVICE).manual_seed(3)
    given = [torch.randn(shape, generator=draws, device=DEVICE) for shape in shapes]
    exact = compute(*(tensor.double() for tensor in given))
    return (compute(*given).double() - exact).norm().float() / exact.norm().float()
