"""Steps of a pipeline, compared with a hand-written loop over torch.distributed.pipelining.

    python tests/benchmarks/pipeline.py [--ranks 2] [--width 256] [--micro-batches 8] [--rounds 7]

Each rank is a process of this machine and has one stage; gloo connects them. Both loops have the same modules:
transformer layers in sequence, AdamW, and a clipped gradient norm, for which the hand-written loop needs one
all-reduce. The three cases take turns, each round in another order. A time is that of the slowest rank: the median over
rounds, with the range in brackets. `x` is the median of the rounds' ratios to the first line. `by hand, again` shows
this machine's noise. hpctrain's part is a step of its loop, and the means of the losses every ten steps; what it checks
between two steps isn't measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from contextlib import closing

import torch
import torch.distributed as dist
from as_ranks import run_as_ranks
from comparison import OwnSteps, join_ranks, measure
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

from hpctrain.data.fetch import TensorBatches
from hpctrain.parallel.pipeline.plan import stages_of
from hpctrain.rank.world import World
from hpctrain.tasks.task import Task

warnings.filterwarnings("ignore", category=UserWarning)
SAMPLES, LENGTH, VOCABULARY, LAYERS = 2, 64, 512, 8
"""Samples of a micro-batch, tokens of a sample, size of the vocabulary, transformer layers."""


class Sequences(Task):
    """Random tokens; the model predicts the token at each place."""

    def build_model(self) -> nn.Module:
        return model(int(os.environ["STEP_WIDTH"]))

    def train_dataset(self):
        draws = torch.Generator().manual_seed(1)
        return TensorBatches(torch.randint(VOCABULARY, (2048, LENGTH), generator=draws))

    def loss(self, model, batch):
        tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
        return loss_of(model(tokens), tokens)


def model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Steps:
    """The two loops."""

    def __init__(self, world: World, micro_batches: int) -> None:
        words = ["task=custom", "task._target_=pipeline.Sequences", "parallel=pp"]
        words += [f"trainer.global_batch_size={SAMPLES * micro_batches}", f"trainer.micro_batch_size={SAMPLES}"]
        words += ["trainer.clip_grad_norm=1.0"]
        self.own = OwnSteps(words, world)
        whole = model(int(os.environ["STEP_WIDTH"]))
        # hpctrain's first ranks have the last stages; here the first ranks have the first ones
        names = stages_of(whole, [name for name, _ in whole.named_children()], world.size)[world.rank]
        self.module = nn.Sequential(*(whole.get_submodule(name) for name in names))
        stage = PipelineStage(self.module, world.rank, world.size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.samples = self.own.training.data.dataset.tensors[0]
        self.world = world
        self.count = SAMPLES * micro_batches
        self.draws = torch.Generator().manual_seed(1)

    def by_hand(self) -> None:
        first, last = self.world.rank == 0, self.world.rank == self.world.size - 1
        for _ in range(10):
            tokens = self.samples[torch.randint(len(self.samples), (self.count,), generator=self.draws)]
            self.schedule.step(*([tokens] if first else []), target=tokens if last else None, return_outputs=False)
            norms = torch._foreach_norm([each.grad for each in self.module.parameters()])
            total = torch.stack(norms).square().sum()
            dist.all_reduce(total)
            scale = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([each.grad for each in self.module.parameters()], scale)
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256, help="of the layers")
    parser.add_argument("--micro-batches", type=int, default=8, help="of each step")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ["STEP_WIDTH"] = str(options.width)
    sys.modules["pipeline"] = sys.modules["__main__"]
    if "RANK" not in os.environ:
        run_as_ranks(options.ranks)
    world = join_ranks(options.ranks, "parallel=pp")
    steps = Steps(world, options.micro_batches)
    with closing(steps.own.batches):
        if world.is_rank_zero:
            print(f"torch {torch.__version__}, {world.size} ranks, {torch.get_num_threads()} threads each\nten steps")
        cases = [("by hand", steps.by_hand), ("by hand, again", steps.by_hand), ("hpctrain", steps.own.ten)]
        measure(world, options.rounds, cases)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive rank zero's store


if __name__ == "__main__":
    main()
