"""The trial as an application of Hydra, for hydra-optuna-sweeper and hydra-submitit-launcher.

The loop has no logging and no checkpoints: it is the least that a user of the plugin writes.
"""

from dataclasses import dataclass

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from searched import BATCH_SIZE, Searched
from torch.nn.functional import mse_loss


@dataclass
class Config:
    """Keys of the application; `first` is the number of the process's first trial."""

    lr: float = 1e-3
    lengths: str = "???"
    first: int = 0


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config: Config) -> float:
    searched = Searched(config.lengths, config.first + HydraConfig.get().job.num)
    model = searched.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    points, targets = searched.samples()
    for chosen in torch.randperm(len(points), generator=torch.Generator().manual_seed(0)).split(BATCH_SIZE):
        searched.loss(model, points[chosen], targets[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(mse_loss(model(points), targets))


if __name__ == "__main__":
    main()
