"""A replica whose layers are divided among ranks, which form a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hpctrain.config.mesh import keeps_gradients_whole
from hpctrain.config.parallel import Parallel
from hpctrain.config.root import Config
from hpctrain.parallel.fsdp import FsdpReplica, ShardedLossModule
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.neighbours import Neighbours, groups_of_positions
from hpctrain.parallel.pipeline.pipeline import Pipeline
from hpctrain.parallel.pipeline.plan import find_plan, stages_of
from hpctrain.parallel.pipeline.random_streams import RandomStreams
from hpctrain.parallel.pipeline.stages import Stages
from hpctrain.parallel.replica import Accumulating, CountsOnce, Passes
from hpctrain.phrases import listed
from hpctrain.rank.determinism import rank_seed

if TYPE_CHECKING:  # of the rooms above, whose objects a replica passes through
    from hpctrain.data.micro_batch import MicroBatch
    from hpctrain.train.part_timer import PartTimer

MOST_MICRO_BATCHES = 2**20
"""Of a step; keeps the numbers of micro-batches of different steps apart."""
SHOWN = 6
"""How many modules of a stage the log names."""

log = logging.getLogger("hpctrain.train")


class PipelineReplica(FsdpReplica):
    """A replica of which each rank has some stages; ranks at the same position share the parameters of theirs.

    Args:
        root: see `FsdpReplica`.
        world: the ranks.
        parallel: of the configuration.
        pipeline: of this rank.
        shapes_of: returns a key of a batch or of arguments, equal for those whose tensors have equal shapes.
    """

    counts_flops = False

    def __init__(
        self,
        root: ShardedLossModule,
        world: TrainingWorld,
        parallel: Parallel,
        pipeline: Pipeline,
        shapes_of: Callable[[Any], Hashable],
    ) -> None:
        super().__init__(root, world, parallel)
        self._pipeline = pipeline
        self._shapes_of = shapes_of
        self.has_results = pipeline.stages.is_last
        self.copies = pipeline.stages.copies

    def accumulate(
        self,
        passes: Passes,
        step: int,
        micro_batches: Iterator[MicroBatch],
        accumulating: Accumulating | None,
        timer: PartTimer | None,
    ) -> float:
        """See `Replica`."""
        del accumulating
        first = step * MOST_MICRO_BATCHES
        # what loading draws in this process has to be the same on all ranks of the pipeline, too
        with self._pipeline.streams.of_task(first + MOST_MICRO_BATCHES - 1):
            step_batches = list(_until_last(micro_batches))
        if timer is not None:
            timer.mark("data")
        keys = [self._shapes_of(micro_batch.batch) for micro_batch in step_batches]
        self._pipeline.step(passes.begin_parts(step_batches, timer), keys, first)
        return step_batches[-1].rescale

    def _total_norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor | None:
        return self._pipeline.total_norm(gradients)

    def evaluate(
        self, prepare: Callable[[], Callable[[nn.Module], Any]], batch: Any, number: int, counts_once: CountsOnce
    ) -> Any:
        """See `Replica`."""
        # a number that no step has, so that the task draws the same random numbers in each evaluation
        with self._pipeline.streams.of_task(-1 - number):
            return self._pipeline.evaluate(prepare(), self._shapes_of(batch), counts_once)

    def loading(self, number: int) -> AbstractContextManager[object]:
        """See `Replica`: all ranks of the pipeline then draw the same random numbers."""
        return self._pipeline.streams.of_task(-MOST_MICRO_BATCHES - number)

    @contextmanager
    def calls(self) -> Iterator[None]:
        """See `Replica`."""
        with ExitStack() as contexts:
            contexts.enter_context(super().calls())
            contexts.enter_context(self._pipeline.calls(self._shapes_of))
            yield


def cut_into_stages(
    model: nn.Module, task: object, parallel: Parallel, neighbours: Neighbours, *, is_logged: bool
) -> Stages:
    """Cut a model into stages.

    Args:
        model: not wrapped, on `meta`, where the parts that only other ranks have stay.
        task: may have a plan.
        parallel: of the configuration.
        neighbours: of this rank.
        is_logged: whether this rank logs the stages.

    Raises:
        TaskError: the plan doesn't fit the model.
        ConfigError: there is no plan, or it has too few entries.
    """
    num_stages = neighbours.degree * parallel.stages_per_rank
    names = stages_of(model, find_plan(model, task, neighbours.degree), num_stages, parallel.stages)
    if is_logged:
        for number, own in enumerate(names):
            log.info("stage %d of the pipeline: %s", number, listed(own, shown=SHOWN))
    return Stages(model, names, neighbours.position, neighbours.degree)


def join_pipeline(root: ShardedLossModule, stages: Stages, config: Config, world: TrainingWorld) -> Pipeline:
    """Make this rank's part in a pipeline; collective.

    Args:
        root: around the model, sharded, with values.
        stages: of this rank.
        config: of the run.
        world: the ranks.
    """
    assert world.mesh is not None
    neighbours, shape = world.mesh.neighbours, world.mesh.shape
    assert neighbours is not None
    if stages.num_own > 1 and not keeps_gradients_whole(config.parallel, shape):
        # FSDP2 keeps the gradients that wait for the other replicas in one piece for each group of parameters, in which
        # those of different stages would be mixed
        root.accumulating = None
    timeout = timedelta(seconds=config.health.collective_timeout_s)
    groups = groups_of_positions(shape, world.rank, list(stages.shared.values()), timeout)
    shared = [
        (stages.model.get_parameter(name), groups[positions])
        for name, positions in stages.shared.items()
        if neighbours.position in positions
    ]
    streams = RandomStreams(rank_seed(config.seed, world.share.number), world.gpus)
    group = world.mesh.device_mesh.get_group("pipeline")
    return Pipeline(root, stages, neighbours, streams, group=group, device=world.device, shared=shared)


def _until_last(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.is_last:
            return
