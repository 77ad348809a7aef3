"""Cut a model into the stages of a pipeline."""

from __future__ import annotations

import logging
from datetime import timedelta

from torch import nn

from hpctrain.config.mesh import keeps_gradients_whole
from hpctrain.config.parallel import Parallel
from hpctrain.config.root import Config
from hpctrain.parallel.pipeline.pipeline import Pipeline
from hpctrain.parallel.pipeline.plan import find_plan, stages_of
from hpctrain.parallel.pipeline.random_streams import RandomStreams
from hpctrain.parallel.pipeline.stages import Stages
from hpctrain.parallel.sharding import ShardedLossModule
from hpctrain.phrases import listed
from hpctrain.rank.determinism import rank_seed
from hpctrain.rank.neighbours import Neighbours, groups_of_positions
from hpctrain.rank.world import World
from hpctrain.tasks.task import Task

SHOWN = 6
"""How many modules of a stage the log names."""

log = logging.getLogger("hpctrain.train")


def cut_into_stages(
    model: nn.Module, task: Task, parallel: Parallel, neighbours: Neighbours, *, is_logged: bool
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


def join_pipeline(root: ShardedLossModule, stages: Stages, model: nn.Module, config: Config, world: World) -> Pipeline:
    """Make this rank's part in a pipeline; collective.

    Args:
        root: around the model.
        stages: of this rank.
        model: sharded, with values.
        config: of the run.
        world: the ranks.
    """
    assert world.mesh is not None
    assert world.mesh.neighbours is not None
    if stages.num_own > 1 and not keeps_gradients_whole(config.parallel, world.mesh.shape):
        # FSDP2 keeps the gradients that wait for the other replicas in one piece for each group of parameters, in which
        # those of different stages would be mixed
        root.accumulating = None
    timeout = timedelta(seconds=config.health.collective_timeout_s)
    groups = groups_of_positions(world.mesh.shape, world.rank, list(stages.shared.values()), timeout)
    shared = [
        (model.get_parameter(name), groups[positions])
        for name, positions in stages.shared.items()
        if world.mesh.neighbours.position in positions
    ]
    streams = RandomStreams(rank_seed(config.seed, world.data_rank), world.gpus)
    group = world.mesh.device_mesh.get_group("pipeline")
    return Pipeline(root, stages, world.mesh.neighbours, streams, group=group, device=world.device, shared=shared)
