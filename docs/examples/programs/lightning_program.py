"""Lightning on scikit-learn's digits; after any interruptions it ends with the same weights.

python -m hpctrain run cluster.processes_per_node=2 -- python lightning_program.py 5
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpctrain import session
from hpctrain.adapters.lightning import SessionCallback, ShuffledBatches, resume_path

pixels, digits = load_digits(return_X_y=True)
DATA = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(DATA, batch_sampler=ShuffledBatches(self, len(DATA), batch_size=32))


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=int(sys.argv[1]),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp_find_unused_parameters_true",
        use_distributed_sampler=False,
        logger=False,
        log_every_n_steps=1,
        callbacks=[SessionCallback(), ModelCheckpoint(session.checkpoint_dir(), save_top_k=-1)],
    )
    trainer.fit(Digits(), ckpt_path=resume_path())
