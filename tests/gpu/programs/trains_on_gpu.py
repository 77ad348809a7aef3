"""A program that uses the GPU, trains in its own process, and uses the GPU again.

python trains_on_gpu.py FOLDER: prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import hpctrain
from tests.gpu.programs.gpu_tasks import DEVICE, ON_CPU, synchronize

WORDS = {
    "task": "custom",
    "task._target_": "tests.gpu.programs.gpu_tasks.Pictures",
    "+task.dropout": 0.3,
    "trainer.max_steps": 8,
    "trainer.max_epochs": None,
    "trainer.global_batch_size": 16,
    "trainer.deterministic": True,
    "logger.tensorboard": False,
    "logger.every_steps": 2,
    "code.snapshot": "none",
}


def settings():
    """What training may change only for its own time."""
    found = [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_rng_state().sum().item()]
    if not ON_CPU:
        sync_mode, device = torch.cuda.get_sync_debug_mode(), torch.cuda.current_device()
        found += [torch.cuda.get_rng_state().sum().item(), sync_mode, device, torch.backends.cudnn.deterministic]
        found += [torch.cuda.current_stream() == torch.cuda.default_stream(), torch.backends.cuda.matmul.allow_tf32]
    return found


def main(folder):
    before = torch.randn(512, 512, device=DEVICE)
    product = before @ before
    synchronize()
    taken = settings()
    straight = hpctrain.fit(hpctrain.compose({**WORDS, "run_dir": folder / "straight"}))
    kept = settings() == taken
    # the memory and the context of the program are as they were
    same = torch.equal(before @ before, product)
    config = hpctrain.compose({**WORDS, "run_dir": folder / "paused", "trainer.pause_at_step": 3})
    stopped_at = hpctrain.fit(config).status().step
    same = same and torch.equal(before @ before, product)
    resumed = hpctrain.fit(config)
    model = straight.load_model().to(DEVICE)
    with torch.inference_mode():
        logits = model(torch.zeros(3, 1, 8, 8, device=DEVICE))
    report = {
        "digests": [run.checkpoints()[-1].weights_digest for run in (straight, resumed)],
        "attempts": [str(attempt.reason) for attempt in resumed.status().attempts],
        "settings kept": kept and settings() == taken,
        "same product": same and torch.equal(before @ before, product),
        "finite": bool(logits.isfinite().all()),
        "stopped at": stopped_at,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
