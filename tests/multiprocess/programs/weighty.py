"""A GPT whose weights are most of its process's memory, and a record of that memory by phase, of each rank."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from hpctrain.data import TensorBatches
from hpctrain.models.gpt import GPT
from hpctrain.tasks import Task

VOCABULARY, LENGTH = 4096, 8


def anonymous_bytes():
    """Memory of this process that isn't a file's (proc(5), RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


class Watch(threading.Thread):
    """Records the most memory in each phase, and that at its end, beyond what there was at the beginning."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.before = path, anonymous_bytes()
        self.phase, self.peaks, self.ends = "build", {}, {}
        self.start()

    def run(self):
        while True:
            self.look()
            time.sleep(0.002)

    def look(self):
        found = anonymous_bytes() - self.before
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), found)
        return found

    def enter(self, phase):
        self.ends[self.phase] = self.look()
        self.phase = phase
        self.path.write_text(json.dumps({"peaks": self.peaks, "ends": self.ends}))


class Weighty(Task):
    """Predicts random tokens; WEIGHTY_RECORD names a folder for the records."""

    def __init__(self, width=256, layers=4):
        self.sizes = {"width": width, "num_layers": layers, "num_heads": 4}
        rank = os.environ.get("RANK", "0")
        self.calls = 0
        self.watch = Watch(Path(os.environ["WEIGHTY_RECORD"], f"{rank}.json"))

    def build_model(self):
        return GPT(vocab_size=VOCABULARY, context_length=LENGTH, **self.sizes)

    def train_dataset(self):
        draws = torch.Generator().manual_seed(1)
        return TensorBatches(torch.randint(VOCABULARY, (64, LENGTH + 1), generator=draws))

    def loss(self, model, batch):
        # steps 1 to 3; the save of step 3 comes before the fourth
        self.calls += 1
        self.watch.enter({1: "steps", 4: "after the save"}.get(self.calls, self.watch.phase))
        tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
