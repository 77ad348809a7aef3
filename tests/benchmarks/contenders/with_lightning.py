"""Lightning's Trainer; LOGGING=1 has it log the loss every ten steps and keep its progress line, else all is off."""

import logging
import os
import warnings

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from tests.benchmarks.contenders.workload import Workload

LOGGING = os.environ.get("LOGGING") == "1"
work = Workload()


class Epochs:
    def __init__(self):
        work.load()

    def __len__(self):
        return work.num_samples // work.batch_size

    def __iter__(self):
        return work.batches()


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = work.model()

    def training_step(self, batch, _):
        loss = work.loss(self.net, *batch)
        if LOGGING:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
trainer = Trainer(
    accelerator="cpu",
    devices=work.world_size,
    strategy="ddp" if work.world_size > 1 else "auto",
    max_steps=work.steps,
    max_epochs=-1,
    logger=CSVLogger(f"{os.environ['REPORT']}.lightning") if LOGGING else False,
    log_every_n_steps=10,
    enable_checkpointing=False,
    enable_progress_bar=LOGGING,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
trainer.fit(Module(), train_dataloaders=Epochs())
work.report()
work.leave()
