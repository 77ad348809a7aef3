"""FLOPs of a loss that all ranks compute together, of which rank 1 has fewer samples."""

from __future__ import annotations

from hpctrain.config.compose import Composer
from hpctrain.data.micro_batch import map_tensors
from hpctrain.parallel.all_gather import all_gather_with_grad
from hpctrain.train.profiling.flops import flops_by_trial
from hpctrain.train.training import build
from tests.multiprocess.programs.gloo_world import joined
from tests.multiprocess.programs.trial import Trial

WORDS = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.few_samples.Together",
    "trainer.global_batch_size=8",
    "trainer.max_steps=1",
)


class Together(Trial):
    def loss(self, model, batch):
        return all_gather_with_grad(model(batch[0])).square().mean()


def counted():
    """FLOPs per sample where rank 1 has two samples, one, and none."""
    world = joined()
    training = build(Composer().compose([*WORDS, "+task.eval_samples=0"]), world)
    whole, found = next(training.data.loader(0).micro_batches(None)), []
    for size in (2, 1, 0):
        own = size if world.rank else 2
        batch = map_tensors(lambda tensor, own=own: tensor[:own], whole.batch)
        found.append(flops_by_trial(training.step, whole._replace(batch=batch, num_samples=own), world))
    world.close()
    return found
