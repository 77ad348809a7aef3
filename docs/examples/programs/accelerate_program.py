"""Accelerate on scikit-learn's digits; after any interruptions it ends with the same weights.

python -m hpctrain run cluster.processes_per_node=2 -- python accelerate_program.py 200
"""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpctrain import session


def main() -> None:
    session.start(total_steps=(steps := int(sys.argv[1])))
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, dataloader_config=order, kwargs_handlers=[ddp])
    set_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    step = 0
    if save := session.last_save():
        accelerator.load_state(str(save.path))
        step = save.step
    stop = False
    while step < steps and not stop:
        epoch, start = divmod(step, len(loader))
        rest = accelerator.skip_first_batches(loader, start)
        rest.set_epoch(epoch)
        for images, labels in rest:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            session.step(step, {"train/loss": loss} if accelerator.is_main_process else None)
            stop = session.should_stop()
            if stop or step % 50 == 0 or step == steps:
                path = session.checkpoint_dir() / f"step_{step:08d}"
                accelerator.save_state(str(path))
                accelerator.wait_for_everyone()
                session.saved(step, path)
            if stop or step == steps:
                break
    if step == steps:
        session.done()  # without it, the run is requeued after a stop


if __name__ == "__main__":
    main()
