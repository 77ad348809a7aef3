"""Tasks that harm or occupy the GPU at a call of the loss, as `Trial` does to its process, and some that measure it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_weight
from torch.utils.data import Dataset

from hpctrain.data import TensorBatches
from hpctrain.tasks.digits import Digits
from hpctrain.tasks.text import Text
from tests.multiprocess.programs.trial import CLASSES, Trial

DEVICE = os.environ.get("HPCTRAIN_GPU_TESTS_DEVICE", "cuda")
"""With `cpu`, faults of the device are imitated, so that the tests of them can be rehearsed without one."""
ON_CPU = DEVICE == "cpu"
FEW_STEPS = (
    "task=custom",
    "task._target_=tests.gpu.programs.gpu_tasks.Pictures",
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
    if ON_CPU:
        time.sleep(seconds)
        return
    torch.cuda._sleep(round(seconds * CYCLES_PER_S))


def synchronize():
    """Wait for the GPU."""
    if not ON_CPU:
        torch.cuda.synchronize()


def read_wild_address():
    """Read from an address that is no memory's; compiled by NVRTC, since a node may lack a C++ compiler."""
    if ON_CPU:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    # the address is a value, so that the compiler can't know it
    code = "template <typename T> T read(T at) { return *reinterpret_cast<T*>(static_cast<unsigned long long>(at)); }"
    torch.cuda.jiterator._create_jit_fn(code)(torch.full((1,), 8.0, device=DEVICE))


def report_broken_memory():
    """Raise what torch raises for a GPU whose memory is broken."""
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be")


def page_locked(tensor):
    """Copy a tensor into memory that the GPU can copy from without waiting."""
    return tensor.clone() if ON_CPU else tensor.pin_memory()


def index_out_of_range():
    """Fail on the device; the host learns of it when it next waits."""
    if ON_CPU:
        raise RuntimeError("CUDA error: device-side assert triggered")
    torch.zeros(4, device=DEVICE)[torch.tensor([7], device=DEVICE)]


def is_page_locked(tensor):
    """Whether a tensor is in page-locked memory; on the CPU, nothing has to be."""
    return ON_CPU or tensor.is_pinned()


def exhaust():
    """Allocate until the GPU has no more memory for this process."""
    if ON_CPU:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
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
    the device; `wild` reads from an address that is no memory's; `ecc` raises the error of broken memory; `exhaust`
    takes more memory than there is. TRIAL_ACTED names a file that is touched before any action.
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
        elif action == "wild":
            read_wild_address()
        elif action == "ecc":
            report_broken_memory()
        elif action == "exhaust":
            exhaust()
        else:
            super()._act(action)


class Mislabelled(Pictures):
    """Has a label that is no class: that of the last sample.

    Args:
        wrong: `train` or `eval`: which data have it.
        options: see `Trial`.
    """

    def __init__(self, wrong="train", **options):
        super().__init__(**options)
        self.wrong = wrong

    def train_dataset(self):
        return self._spoilt("train", super().train_dataset())

    def eval_dataset(self):
        return self._spoilt("eval", super().eval_dataset())

    def _spoilt(self, name, data):
        if self.wrong == name:
            data.tensors[1][-1] = CLASSES
        return data


class MislabelledAndMoved(Mislabelled):
    """The same, and moves its batches itself."""

    def to_device(self, batch, device):
        return super().to_device(batch, device)


class Peeking(Pictures):
    """Looks at the loss in each step."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.seen = loss.item()
        return loss


class Killed:
    """Kills its process in the training loss whose number KILLED_IN names, counted from 1 in each process."""

    calls = 0

    def loss(self, model, batch):
        self.calls += model.training
        if model.training and self.calls == int(os.environ.get("KILLED_IN", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class KilledText(Killed, Text):
    """Text, killed."""


class KilledDigits(Killed, Digits):
    """Digits, killed."""


class Wide(Trial):
    """Keeps 64 MB per sample for the backward pass, and may take only 256 MB of the GPU's memory."""

    WIDTH, LAYERS, LIMIT_BYTES = 2**21, 8, 2**28
    AS_ON_GPU = 2
    """Samples that fit, where the CPU takes the place of the GPU."""

    def __init__(self):
        super().__init__(num_samples=64, eval_samples=0)

    def build_model(self):
        if not ON_CPU:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(self.LIMIT_BYTES / total)
        return Scaled(self.LAYERS)

    def loss(self, model, batch):
        features, *_ = batch
        if ON_CPU and len(features) > self.AS_ON_GPU:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        # made here: neither the data set nor the copy to the GPU should take long
        return model(features[:, :1].expand(-1, self.WIDTH).contiguous()).square().mean()


class Scaled(nn.Module):
    """Multiplies by a weight, again and again, and squashes the result."""

    def __init__(self, layers):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(layers))

    def forward(self, features):
        for weight in self.weights:
            features = torch.tanh(features * weight)
        return features


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
