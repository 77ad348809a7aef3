"""A replica whose layers are divided among ranks, which form a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.config.mesh import keeps_gradients_whole
from hpctrain.config.parallel import Parallel
from hpctrain.config.root import Config
from hpctrain.errors import TaskError
from hpctrain.parallel.fsdp import FsdpReplica, ShardedLossModule, total_norm
from hpctrain.parallel.local_part import local_part
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.neighbours import Arrival, Form, Neighbours, groups_of_positions
from hpctrain.parallel.pipeline.plan import find_plan, stages_of
from hpctrain.parallel.pipeline.random_streams import RandomStreams
from hpctrain.parallel.pipeline.schedule import Pass, passes_of
from hpctrain.parallel.pipeline.stages import Activations, Stage, Stages, forward_replaced
from hpctrain.parallel.replica import Accumulating, EvaluationContext, PartPasses, Passes
from hpctrain.phrases import listed
from hpctrain.rank.determinism import rank_seed

if TYPE_CHECKING:  # of the rooms above, whose objects a replica passes through
    from hpctrain.data.micro_batch import MicroBatch
    from hpctrain.train.profiling.sampler import PartTimer

MOST_MICRO_BATCHES = 2**20
"""Of a step; keeps the numbers of micro-batches of different steps apart."""
SHOWN = 6
"""How many modules of a stage the log names."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
"""Types of the tensors that callbacks can get from the model."""
MOST_DIMENSIONS = 8
"""Of a tensor that callbacks can get from the model."""

log = logging.getLogger("hpctrain.train")


class _OpenPass:
    """A forward pass whose backward pass is still to come.

    Attributes:
        inputs: activations of the stage before, with room for gradients.
        output: what was computed: activations, or the loss.
    """

    def __init__(self) -> None:
        self.inputs: Sequence[Tensor] = ()
        self.output: Any = None

    @property
    def awaited(self) -> list[Tensor]:
        """The activations for which the next stage returns gradients."""
        return [tensor for tensor in _as_tuple(self.output) if tensor.requires_grad]


class PipelineReplica(FsdpReplica):
    """A replica of which each rank has some stages; ranks at the same position share the parameters of theirs.

    Args:
        root: see `FsdpReplica`; it sends no buffers by itself: a backward pass may still need those of an earlier
            micro-batch, so they are sent once for each step.
        world: the ranks.
        config: of the run.
        stages: of this rank.
        shared: parameters of this rank that other positions have as well, with the group of these ranks.
        shapes_of: returns a key of a batch or of arguments, equal for those whose tensors have equal shapes.
    """

    counts_flops = False

    def __init__(
        self,
        root: ShardedLossModule,
        world: TrainingWorld,
        config: Config,
        stages: Stages,
        *,
        shared: Sequence[tuple[nn.Parameter, dist.ProcessGroup]],
        shapes_of: Callable[[Any], Hashable],
    ) -> None:
        super().__init__(root, world, config.parallel)
        assert self._mesh.neighbours is not None
        self.has_results = stages.is_last
        self.copies = stages.copies
        self._stages = stages
        self._neighbours = self._mesh.neighbours
        self._streams = RandomStreams(rank_seed(config.seed, world.share.number), world.gpus)
        self._group = self._mesh.device_mesh.get_group("pipeline")
        self._device = world.device
        self._shared = shared
        self._shapes_of = shapes_of
        self._counted_elsewhere = {
            id(parameter)
            for name, parameter in stages.model.named_parameters(remove_duplicate=False)
            if name in stages.copies
        }
        self._arrivals: dict[Pass, Arrival] = {}
        self._open: dict[tuple[int, int], _OpenPass] = {}

    def accumulate(
        self,
        passes: Passes,
        step: int,
        micro_batches: Iterator[MicroBatch],
        accumulating: Accumulating | None,
        timer: PartTimer | None,
    ) -> float:
        """See `Replica`."""
        first = step * MOST_MICRO_BATCHES
        # what loading draws in this process has to be the same on all ranks of the pipeline, too
        with self._streams.of_task(first + MOST_MICRO_BATCHES - 1):
            step_batches = list(_until_last(micro_batches))
        if timer is not None:
            timer.mark("data")
        keys = [self._shapes_of(micro_batch.batch) for micro_batch in step_batches]
        self._compute_step(passes.begin_parts(step_batches, timer), keys, first)
        return step_batches[-1].gradient_factor

    def _compute_step(self, work: PartPasses, keys: Sequence[Hashable], first_number: int) -> None:
        """Compute the gradients of one step.

        Args:
            work: what is computed.
            keys: of the micro-batches; equal for those of equal shapes.
            first_number: of the first micro-batch, for the random numbers of the task.
        """
        neighbours = self._neighbours
        self._root.send_buffers()
        kinds = [("step", key) for key in keys]
        passes = passes_of(neighbours.position, neighbours.degree, len(self._stages.local), len(keys))
        for current, following in zip_longest(passes, passes[1:]):
            # receives match sends in order, so that the next pass can't begin to receive before this one
            if self._begin_receiving(current, kinds) and following is not None:
                self._begin_receiving(following, kinds)
            place = current.local_stage, current.micro_batch
            if current.is_forward:
                self._open[place] = self._forward(current, work, kinds, first_number + current.micro_batch)
            else:
                self._backward(current, work, self._open.pop(place))
        neighbours.finish()
        self._add_up_shared()

    def _total_norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor | None:
        terms = [gradient for weight, gradient in gradients.items() if id(weight) not in self._counted_elsewhere]
        norm = total_norm(terms) if terms else torch.zeros((), device=self._device)
        # offloaded gradients are in host memory, and a rank without any must send from the same device as the others
        square = norm.double().square().to(self._device)
        dist.all_reduce(square, group=self._group)
        return square.sqrt().to(norm.dtype)

    def evaluate(
        self, prepare: Callable[[], Callable[[nn.Module], Any]], batch: Any, number: int, context: EvaluationContext
    ) -> Any:
        """See `Replica`."""
        # a number that no step has, so that the task draws the same random numbers in each evaluation
        with self._streams.of_task(-1 - number):
            compute = prepare()

            def evaluate_stage(local_stage: int, receive: Callable[[], Activations]) -> Any:
                with context(self._stages.local[local_stage].is_last, local_stage + 1 < len(self._stages.local)):
                    return self._in_stage(local_stage, receive, compute)

            return self._through_stages(("evaluation", self._shapes_of(batch)), evaluate_stage)

    def loading(self, number: int) -> AbstractContextManager[object]:
        """See `Replica`: all ranks of the pipeline then draw the same random numbers."""
        return self._streams.of_task(-MOST_MICRO_BATCHES - number)

    @contextmanager
    def calls(self) -> Iterator[None]:
        """See `Replica`: each rank gets what the last stage returns."""
        forward = self._stages.model.forward

        def through_all_stages(*arguments: Any, **options: Any) -> Tensor:
            def call_stage(local_stage: int, receive: Callable[[], Activations]) -> Any:
                return self._stages.forward(local_stage, forward, receive, arguments, options)

            kind = "call", self._shapes_of((arguments, options))
            return self._share_output(self._through_stages(kind, call_stage))

        with super().calls(), forward_replaced(self._stages.model, through_all_stages):
            yield

    def _through_stages(self, kind: Hashable, compute: Callable[[int, Callable[[], Activations]], Any]) -> Any:
        """Compute all stages of this rank, without gradients; return what the last stage returns, None elsewhere."""
        for local_stage, stage in enumerate(self._stages.local):
            output = compute(local_stage, partial(self._receive, _OpenPass(), Pass(True, local_stage, 0), kind))
            if stage.is_last:
                return output
            self._pass_on(stage, kind, output)
        return None

    def _share_output(self, output: Any) -> Tensor:
        """Send the last stage's output to all ranks of the pipeline, and return it."""
        head = torch.zeros(2 + MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
        if self._stages.is_last:
            if not isinstance(output, Tensor) or output.dim() > MOST_DIMENSIONS or output.dtype not in DTYPES:
                kind = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
                raise TaskError(
                    f"in a pipeline, callbacks can call a model that returns a tensor of a usual type, and not {kind}"
                )
            head[: 2 + output.dim()] = torch.tensor([DTYPES.index(output.dtype), output.dim(), *output.shape])
        # the last position has the lowest rank
        dist.broadcast(head, group=self._group, group_src=0)
        dtype, dim, *sizes = head.tolist()
        if not self._stages.is_last:
            output = torch.empty(sizes[:dim], dtype=DTYPES[dtype], device=self._device)
        shared: Tensor = output.contiguous()
        dist.broadcast(shared, group=self._group, group_src=0)
        return shared

    def _forward(self, current: Pass, work: PartPasses, kinds: Sequence[Hashable], number: int) -> _OpenPass:
        stage, kind = self._stages.local[current.local_stage], kinds[current.micro_batch]
        open_pass, has_loss = _OpenPass(), stage.is_last
        call = partial(self._in_stage, current.local_stage, partial(self._receive, open_pass, current, kind))
        is_repeated = stage is not self._stages.local[-1]
        with self._streams.of_task(number):
            open_pass.output = work.forward(call, current.micro_batch, has_loss=has_loss, is_repeated=is_repeated)
        if not has_loss:
            self._pass_on(stage, kind, open_pass.output)
        return open_pass

    def _backward(self, current: Pass, work: PartPasses, open_pass: _OpenPass) -> None:
        if self._stages.local[current.local_stage].is_last:
            work.backward(open_pass.output, None, current.micro_batch)
        else:
            gradients = self._arrivals.pop(current).wait()
            if awaited := open_pass.awaited:
                work.backward(awaited, gradients, current.micro_batch)
        inputs = [tensor for tensor in open_pass.inputs if tensor.requires_grad]
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]
        self._neighbours.to_before.send(gradients)

    def _begin_receiving(self, current: Pass, kinds: Sequence[Hashable]) -> bool:
        """Begin to receive what a pass needs, so that it comes while the pass before computes.

        Returns:
            Whether there is nothing left to receive for this pass.
        """
        stage = self._stages.local[current.local_stage]
        if current in self._arrivals or (stage.is_first if current.is_forward else stage.is_last):
            return True
        if current.is_forward:
            kind = stage.index, kinds[current.micro_batch]
            wire = self._neighbours.from_before
            if not wire.knows(kind):
                return False
            self._arrivals[current] = wire.expect(wire.forms(kind))
        else:
            open_pass = self._open.get((current.local_stage, current.micro_batch))
            if open_pass is None:
                return False
            forms = [Form.of(tensor) for tensor in open_pass.awaited]
            self._arrivals[current] = self._neighbours.from_next.expect(forms)
        return True

    def _in_stage(
        self, local_stage: int, receive: Callable[[], Activations], compute: Callable[[nn.Module], Any]
    ) -> Any:
        stages, streams = self._stages, self._streams
        return self._root(lambda model: stages.compute(local_stage, compute, receive, streams, model))

    def _receive(self, open_pass: _OpenPass, current: Pass, kind: Hashable) -> Activations:
        """Wait for the activations of the stage before."""
        wire = self._neighbours.from_before
        forms = wire.forms((self._stages.local[current.local_stage].index, kind))
        arrival = self._arrivals.pop(current, None) or wire.expect(forms)
        open_pass.inputs = arrival.wait()
        for tensor, form in zip(open_pass.inputs, forms, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return tuple(open_pass.inputs) if len(open_pass.inputs) > 1 else open_pass.inputs[0]

    def _pass_on(self, stage: Stage, kind: Hashable, output: Activations) -> None:
        self._neighbours.to_next.send_described((stage.index + 1, kind), _as_tuple(output))

    def _add_up_shared(self) -> None:
        """Give all positions that have a parameter the sum of its gradients."""
        for parameter, group in self._shared:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_part(parameter.grad), group=group)


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
        for number, modules in enumerate(names):
            log.info("stage %d of the pipeline: %s", number, listed(modules, max_names=SHOWN))
    return Stages(model, names, neighbours.position, neighbours.degree)


def join_pipeline(
    root: ShardedLossModule,
    stages: Stages,
    config: Config,
    world: TrainingWorld,
    shapes_of: Callable[[Any], Hashable],
) -> PipelineReplica:
    """Make this rank's part in a pipeline; collective.

    Args:
        root: around the model, sharded, with values.
        stages: of this rank.
        config: of the run.
        world: the ranks.
        shapes_of: see `PipelineReplica`.
    """
    assert world.mesh is not None
    shape = world.mesh.shape
    root.sends_buffers = False
    if len(stages.local) > 1 and not keeps_gradients_whole(config.parallel, shape):
        # FSDP2 keeps the gradients that wait for the other replicas in one piece for each group of parameters, in which
        # those of different stages would be mixed
        root.accumulating = None
    timeout = timedelta(seconds=config.health.collective_timeout_s)
    groups = groups_of_positions(shape, world.rank, list(stages.shared.values()), timeout)
    # the groups of this rank are those of its position
    shared = [
        (stages.model.get_parameter(name), groups[positions])
        for name, positions in stages.shared.items()
        if positions in groups
    ]
    return PipelineReplica(root, world, config, stages, shared=shared, shapes_of=shapes_of)


def _as_tuple(output: Activations) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _until_last(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.is_last:
            return
