"""The Hugging Face Trainer on scikit-learn's digits; after any interruptions it ends with the same weights.

python -m hpctrain run cluster.processes_per_node=2 -- python hf_trainer.py 200
"""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hpctrain import session
from hpctrain.adapters.transformers import SessionCallback, resume_path


class Digits(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        pixels, self.labels = load_digits(return_X_y=True)
        self.pixels = torch.tensor(pixels / 16, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": self.pixels[index], "labels": int(self.labels[index])}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(pixels)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


if __name__ == "__main__":
    arguments = TrainingArguments(
        output_dir=str(session.checkpoint_dir()),
        max_steps=int(sys.argv[1]),
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        save_steps=50,
        save_total_limit=2,
        logging_steps=1,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=True,
        report_to="none",
    )
    torch.manual_seed(0)
    trainer = Trainer(Network(), arguments, train_dataset=Digits(), callbacks=[SessionCallback()])
    trainer.train(resume_from_checkpoint=resume_path())
