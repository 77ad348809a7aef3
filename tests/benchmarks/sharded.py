"""A model that ranks share: steps beside an FSDP2 loop by hand, saves and loads beside raw work and torch's DCP.

    python tests/benchmarks/sharded.py [--ranks 2] [--millions 200] [--saved-width 2048] [--rounds 7] [--folder DIR]

All ranks are processes of this machine, connected by gloo. What is compared takes turns in the same processes, each
round beginning with another one; a time is that of the slowest rank, medians over rounds with the span in brackets, and
`x` is the median of each round's ratio to the first line of its group.

The step is that of a GPT with AdamW and a bounded gradient norm, without evaluations and saves; `by hand, again` is how
far the loop is from itself: this machine's noise. hpctrain's part is a step of its loop, and the means of the losses
every ten steps; what it checks between two steps isn't measured.
Then the time for which training waits for a save, against the plain copy of the shards into buffers that are kept (the
rest of the wait is the same for each tensor, so it matters less with wide layers); the whole save, durable on disk,
against a raw write and fsync of the same bytes by all ranks; and a load, checksums included, against
`torch.distributed.checkpoint.load` of a checkpoint that DCP wrote.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from as_ranks import run_as_ranks
from comparison import OwnSteps, join_ranks, measure
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from hpctrain.checkpoint.read import load_newest
from hpctrain.checkpoint.restore import restore_weights
from hpctrain.checkpoint.sharded.live_shards import LiveShards
from hpctrain.checkpoint.sharded.write import ShardedSaver, ShardedWriter
from hpctrain.checkpoint.state import Head
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.data.fetch import TensorBatches
from hpctrain.models.gpt import GPT
from hpctrain.rank.stop_request import StopRequest
from hpctrain.rank.world import World
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.tasks.task import Task

warnings.filterwarnings("ignore", category=UserWarning)
BATCH, LENGTH, VOCABULARY = 4, 64, 512


class Sequences(Task):
    """Random tokens."""

    def build_model(self) -> nn.Module:
        return model(int(os.environ["STEP_WIDTH"]), 6)

    def train_dataset(self):
        draws = torch.Generator().manual_seed(1)
        return TensorBatches(torch.randint(VOCABULARY, (2048, LENGTH + 1), generator=draws))

    def loss(self, model, batch):
        tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def model(width: int, layers: int) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCABULARY, context_length=LENGTH, num_layers=layers, num_heads=8, width=width)


def by_hand(made: nn.Module, world: World) -> nn.Module:
    """Sharded as torch's tutorial does."""
    for block in made.blocks:
        fully_shard(block, mesh=world.mesh.device_mesh)
    fully_shard(made, mesh=world.mesh.device_mesh)
    return made


class Steps:
    """The two loops."""

    def __init__(self, world: World) -> None:
        words = ["task=custom", "task._target_=sharded.Sequences", "parallel=fsdp"]
        words += [f"trainer.global_batch_size={BATCH * world.size}", "trainer.clip_grad_norm=1.0"]
        self.own = OwnSteps(words, world)
        self.model = by_hand(model(int(os.environ["STEP_WIDTH"]), 6), world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.samples = self.own.training.data.dataset.tensors[0]
        self.draws = torch.Generator().manual_seed(world.rank)

    def by_hand(self) -> None:
        for _ in range(10):
            tokens = self.samples[torch.randint(len(self.samples), (BATCH,), generator=self.draws)]
            loss = cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


class Saves:
    """A sharded model and its AdamW, and all ways to save and to load them."""

    def __init__(self, world: World, millions: int, width: int, folder: Path) -> None:
        layers = max(1, round(millions * 1e6 / (12 * width**2)))
        self.world, self.folder, self.known = world, folder, {}
        self.model = by_hand(model(width, layers), world)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        self.model(tokens).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.directory = RunDirectory.at(folder / "run")
        if world.is_rank_zero:
            self.directory.create(0o750)
        world.barrier()
        ledger = Ledger(self.directory)
        self.claim = Claim(ledger, ledger.last_claim())
        self.writer = ShardedWriter(self.directory, self.claim, world)
        self.shards = [tensor for _, tensor in self.live._parts()]
        self.kept = [tensor.clone() for tensor in self.shards]
        self.bytes = sum(tensor.nbytes for tensor in self.kept)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.upload = None
        self.saver = self.new_saver()
        self.snapshot = self.live.capture()

    def new_saver(self) -> ShardedSaver:
        return ShardedSaver(
            self.directory, self.claim, Checkpoint(), StopRequest(), world=self.world, free_bytes=lambda: None
        )

    @property
    def live(self) -> LiveShards:
        head = Head(step=1, samples_seen=1, world_size=self.world.size, config_digest="c")
        return LiveShards(self.model, {"": self.optimizer}, head=head, rng=[], world=self.world, part_cache=self.known)

    def copy(self) -> None:
        for kept, tensor in zip(self.kept, self.shards, strict=True):
            kept.copy_(tensor)

    def tree(self) -> dict[str, object]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states}

    def begin(self) -> None:
        self.saver.save(self.live, wait=False)

    def begin_dcp(self) -> None:
        self.upload = dcp.async_save(
            self.tree(), checkpoint_id=self.folder / "dcp", async_stager=self.stager, process_group=self.world.control
        )

    def settle(self) -> None:
        self.saver.finish()
        if self.upload is not None:
            self.upload.result()
            self.upload = None

    def raw(self) -> None:
        descriptor = os.open(self.folder / f"raw_{self.world.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in self.kept:
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            while len(data):
                data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def ours(self) -> None:
        self.writer.write(self.snapshot)

    def dcp(self) -> None:
        dcp.save(self.tree(), checkpoint_id=self.folder / "dcp")

    def load(self) -> None:
        found = load_newest(self.directory, self.world)
        restore_weights(found.states, self.model, {"": self.optimizer})

    def load_dcp(self) -> None:
        tree = self.tree()
        dcp.load(tree, checkpoint_id=self.folder / "dcp")
        set_state_dict(self.model, self.optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])

    def clear(self) -> None:
        if self.world.is_rank_zero:
            for path in (self.folder / "dcp", self.directory.checkpoint(1)):
                shutil.rmtree(path, ignore_errors=True)
        (self.folder / f"raw_{self.world.rank}").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=int, default=200, help="parameters of the model that is saved")
    parser.add_argument("--saved-width", type=int, default=2048, help="of that model")
    parser.add_argument("--width", type=int, default=256, help="of the GPT whose steps are measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to measure")
    options = parser.parse_args()
    os.environ["STEP_WIDTH"] = str(options.width)
    sys.modules["sharded"] = sys.modules["__main__"]
    if "RANK" not in os.environ:
        run_as_ranks(options.ranks)
    world = join_ranks(options.ranks, "parallel=fsdp")
    path = world.broadcast(tempfile.mkdtemp(dir=options.folder) if world.is_rank_zero else None)
    try:
        report(world, options, Path(path))
    finally:
        if world.is_rank_zero:
            shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive rank zero's store


def report(world: World, options: argparse.Namespace, folder: Path) -> None:
    show = print if world.is_rank_zero else lambda *_, **__: None
    show(f"torch {torch.__version__}, {world.size} ranks, {torch.get_num_threads()} threads each")
    steps = Steps(world)
    with closing(steps.own.batches):
        show("ten steps")
        cases = [("by hand", steps.by_hand), ("by hand, again", steps.by_hand), ("hpctrain", steps.own.ten)]
        measure(world, 3 * options.rounds, cases)
    del steps
    saves = Saves(world, options.millions, options.saved_width, folder)
    show(f"training waits, for a save of {saves.bytes / 1e9:.2f} GB by each of {world.size} ranks")
    cases = [("copy of the shards into kept buffers", saves.copy), ("hpctrain", saves.begin)]
    measure(world, options.rounds, [*cases, ("DCP's async_save, kept buffers", saves.begin_dcp)], after=saves.settle)
    show("whole save, to durable on disk")
    cases = [("raw write and fsync by all ranks", saves.raw), ("hpctrain", saves.ours), ("DCP's save", saves.dcp)]
    measure(world, options.rounds, cases, after=saves.clear)
    saves.ours()
    saves.dcp()
    show("load, from the page cache")
    measure(world, options.rounds, [("DCP's load", saves.load_dcp), ("hpctrain, with checksums", saves.load)])
    saves.clear()


if __name__ == "__main__":
    main()
