"""Lightning's Trainer on one GPU, in bf16: it logs the loss every ten steps, and saves with `save_checkpoint`."""

import logging
import os
import warnings

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from tests.benchmarks.contenders.gpu_workload import GpuWorkload

work = GpuWorkload()
kind = work.kind


class Batches:
    def __len__(self):
        return work.steps

    def __iter__(self):
        return work.batches()


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = work.model()
        if kind.channels_last:
            self.net.to(memory_format=torch.channels_last)
        # not as an attribute that registers the same weights once more
        self.called = [torch.compile(self.net) if work.compiled else self.net]

    def forward(self, features):
        return self.called[0](
            features.contiguous(memory_format=torch.channels_last) if kind.channels_last else features
        )

    def training_step(self, batch, _):
        loss = work.loss(self, *batch)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return getattr(torch.optim, kind.optimizer)(self.parameters(), fused=True, **kind.options)


class Saves(Callback):
    def on_train_batch_end(self, trainer, *_):
        if work.done % work.block == 0 and work.done < work.steps:
            work.save(lambda: trainer.save_checkpoint("saved.ckpt"))


warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
trainer = Trainer(
    accelerator="gpu" if work.device.type == "cuda" else "cpu",
    devices=1,
    precision="bf16-mixed",
    max_steps=work.steps,
    max_epochs=-1,
    logger=CSVLogger(f"{os.environ['REPORT']}.lightning"),
    log_every_n_steps=10,
    callbacks=[Saves()],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), train_dataloaders=Batches())
work.report()
os._exit(0)
