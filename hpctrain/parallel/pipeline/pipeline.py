"""A pipeline: this rank's stages of a model, and what they exchange with those of its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.errors import TaskError
from hpctrain.parallel.fsdp import ShardedLossModule, total_norm
from hpctrain.parallel.local_part import local_part
from hpctrain.parallel.neighbours import Arrival, Form, Neighbours
from hpctrain.parallel.pipeline.random_streams import RandomStreams
from hpctrain.parallel.pipeline.stages import Activations, Stages, forward_replaced
from hpctrain.parallel.replica import CountsOnce, PartPasses

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
"""Types of the tensors that callbacks can get from the model."""
MOST_DIMENSIONS = 8
"""Of a tensor that callbacks can get from the model."""


class _OpenPass:
    """A forward pass whose backward pass is still to come.

    Attributes:
        given: activations of the stage before, with room for gradients.
        output: what was computed: activations, or the loss.
    """

    def __init__(self) -> None:
        self.given: Sequence[Tensor] = ()
        self.output: Any = None

    @property
    def awaited(self) -> list[Tensor]:
        """The activations for which the next stage returns gradients."""
        return [tensor for tensor in _as_tuple(self.output) if tensor.requires_grad]


class Pipeline:
    """This rank's part in a pipeline; ranks at the same position have a replica or a shard of the same stages.

    Args:
        root: calls a function with the model, whose weights are gathered as needed. From now on, its buffers are sent
            once for each step: a backward pass may still need those of an earlier micro-batch.
        stages: of this rank.
        neighbours: of this rank.
        streams: of random numbers.
        group: of the ranks of a pipeline.
        device: of this rank.
        shared: parameters of this rank that other positions have as well, with the group of these ranks.

    Attributes:
        stages: as given.
        streams: as given.
        device: as given.
    """

    def __init__(
        self,
        root: ShardedLossModule,
        stages: Stages,
        neighbours: Neighbours,
        streams: RandomStreams,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        shared: Sequence[tuple[nn.Parameter, dist.ProcessGroup]] = (),
    ) -> None:
        self.stages = stages
        self.device = device
        self._root = root
        root.sends_buffers = False
        self._neighbours = neighbours
        self.streams = streams
        self._group = group
        self._shared = shared
        self._counted_elsewhere = {
            id(parameter)
            for name, parameter in stages.model.named_parameters(remove_duplicate=False)
            if name in stages.copies
        }
        self._arrivals: dict[Pass, Arrival] = {}
        self._open: dict[tuple[int, int], _OpenPass] = {}

    def step(self, work: PartPasses, keys: Sequence[Hashable], first_number: int) -> None:
        """Compute the gradients of one step; collective.

        Args:
            work: what is computed.
            keys: of the micro-batches; equal for those of equal shapes.
            first_number: of the first micro-batch, for the random numbers of the task.
        """
        neighbours = self._neighbours
        self._root.send_buffers()
        kinds = [("step", key) for key in keys]
        passes = passes_of(neighbours.position, neighbours.degree, self.stages.num_own, len(keys))
        for each, following in zip_longest(passes, passes[1:]):
            # receives match sends in order, so that the next pass can't begin to receive before this one
            if self._begin_receiving(each, kinds) and following is not None:
                self._begin_receiving(following, kinds)
            place = each.local_stage, each.micro_batch
            if each.is_forward:
                self._open[place] = self._forward(each, work, kinds, first_number + each.micro_batch)
            else:
                self._backward(each, work, self._open.pop(place))
        neighbours.finish()
        self._add_up_shared()

    def total_norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the 2-norm of the gradients of all stages, 0-d, the same on every rank; collective.

        Args:
            gradients: of this rank's parameters.
        """
        counted = [gradient for each, gradient in gradients.items() if id(each) not in self._counted_elsewhere]
        norm = total_norm(counted) if counted else torch.zeros((), device=self.device)
        # offloaded gradients are in host memory, and a rank without any must send from the same device as the others
        square = norm.double().square().to(self.device)
        dist.all_reduce(square, group=self._group)
        return square.sqrt().to(norm.dtype)

    def evaluate(
        self,
        compute: Callable[[nn.Module], Any],
        key: Hashable,
        counts_once: CountsOnce,
    ) -> Any:
        """Compute one batch in all stages of this rank, without gradients; collective.

        Call it inside of `streams.of_task`.

        Args:
            compute: calls the model exactly once.
            key: of the batch; equal for batches of equal shapes.
            counts_once: see `CountsOnce`.

        Returns:
            What `compute` returns, where the last stage is; None elsewhere.
        """

        def evaluate_stage(local_stage: int, receive: Callable[[], Activations]) -> Any:
            with counts_once(self.stages.ends(local_stage), local_stage + 1 < self.stages.num_own):
                return self._in_stage(local_stage, receive, compute)

        return self._through_stages(("evaluation", key), evaluate_stage)

    @contextmanager
    def calls(self, key_of: Callable[[Any], Hashable]) -> Iterator[None]:
        """Inside the context, the model may be called on all ranks alike; each gets what the last stage returns.

        Args:
            key_of: returns a key of the arguments, equal for those of equal shapes.
        """
        forward = self.stages.model.forward

        def through_all_stages(*arguments: Any, **options: Any) -> Tensor:
            def call_stage(local_stage: int, receive: Callable[[], Activations]) -> Any:
                return self.stages.forward(local_stage, forward, receive, arguments, options)

            return self._share_output(self._through_stages(("call", key_of((arguments, options))), call_stage))

        with forward_replaced(self.stages.model, through_all_stages):
            yield

    def _through_stages(self, kind: Hashable, compute: Callable[[int, Callable[[], Activations]], Any]) -> Any:
        """Compute all stages of this rank, without gradients; return what the last stage returns, None elsewhere."""
        for local_stage in range(self.stages.num_own):
            output = compute(local_stage, partial(self._receive, _OpenPass(), Pass(True, local_stage, 0), kind))
            if self.stages.ends(local_stage):
                return output
            self._pass_on(local_stage, kind, output)
        return None

    def _share_output(self, found: Any) -> Tensor:
        """Send the last stage's output to all ranks of the pipeline, and return it."""
        head = torch.zeros(2 + MOST_DIMENSIONS, dtype=torch.int64, device=self.device)
        if self.stages.is_last:
            if not isinstance(found, Tensor) or found.dim() > MOST_DIMENSIONS or found.dtype not in DTYPES:
                kind = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
                raise TaskError(
                    f"in a pipeline, callbacks can call a model that returns a tensor of a usual type, and not {kind}"
                )
            head[: 2 + found.dim()] = torch.tensor([DTYPES.index(found.dtype), found.dim(), *found.shape])
        # the last position has the lowest rank
        dist.broadcast(head, group=self._group, group_src=0)
        dtype, dim, *sizes = head.tolist()
        if not self.stages.is_last:
            found = torch.empty(sizes[:dim], dtype=DTYPES[dtype], device=self.device)
        found = found.contiguous()
        dist.broadcast(found, group=self._group, group_src=0)
        output: Tensor = found
        return output

    def _forward(self, current: Pass, work: PartPasses, kinds: Sequence[Hashable], number: int) -> _OpenPass:
        local_stage, kind = current.local_stage, kinds[current.micro_batch]
        each, has_loss = _OpenPass(), self.stages.ends(local_stage)
        call = partial(self._in_stage, local_stage, partial(self._receive, each, current, kind))
        is_repeated = local_stage + 1 < self.stages.num_own
        with self.streams.of_task(number):
            each.output = work.forward(call, current.micro_batch, has_loss=has_loss, is_repeated=is_repeated)
        if not has_loss:
            self._pass_on(local_stage, kind, each.output)
        return each

    def _backward(self, current: Pass, work: PartPasses, each: _OpenPass) -> None:
        if self.stages.ends(current.local_stage):
            work.backward(each.output, None, current.micro_batch)
        else:
            gradients = self._arrivals.pop(current).wait()
            if awaited := each.awaited:
                work.backward(awaited, gradients, current.micro_batch)
        wanted = [tensor for tensor in each.given if tensor.requires_grad]
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanted]
        self._neighbours.to_before.send(gradients)

    def _begin_receiving(self, each: Pass, kinds: Sequence[Hashable]) -> bool:
        """Begin to receive what a pass needs, so that it comes while the pass before computes.

        Returns:
            Whether there is nothing left to receive for this pass.
        """
        stages, local_stage = self.stages, each.local_stage
        if each in self._arrivals or (stages.begins(local_stage) if each.is_forward else stages.ends(local_stage)):
            return True
        if each.is_forward:
            kind = stages.index(local_stage), kinds[each.micro_batch]
            wire = self._neighbours.from_before
            if not wire.knows(kind):
                return False
            self._arrivals[each] = wire.expect(wire.forms(kind))
        else:
            opened = self._open.get((local_stage, each.micro_batch))
            if opened is None:
                return False
            self._arrivals[each] = self._expect_gradients(opened.awaited)
        return True

    def _expect_gradients(self, awaited: Sequence[Tensor]) -> Arrival:
        return self._neighbours.from_next.expect([Form.of(tensor) for tensor in awaited])

    def _in_stage(
        self, local_stage: int, receive: Callable[[], Activations], compute: Callable[[nn.Module], Any]
    ) -> Any:
        stages, streams = self.stages, self.streams
        return self._root(lambda model: stages.compute(local_stage, compute, receive, streams, model))

    def _receive(self, each: _OpenPass, current: Pass, kind: Hashable) -> Activations:
        """Wait for the activations of the stage before."""
        wire = self._neighbours.from_before
        forms = wire.forms((self.stages.index(current.local_stage), kind))
        arrival = self._arrivals.pop(current, None) or wire.expect(forms)
        each.given = arrival.wait()
        for tensor, form in zip(each.given, forms, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return tuple(each.given) if len(each.given) > 1 else each.given[0]

    def _pass_on(self, local_stage: int, kind: Hashable, output: Activations) -> None:
        self._neighbours.to_next.send_described((self.stages.index(local_stage) + 1, kind), _as_tuple(output))

    def _add_up_shared(self) -> None:
        """Give all positions that have a parameter the sum of its gradients."""
        for parameter, group in self._shared:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_part(parameter.grad), group=group)


def _as_tuple(output: Activations) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


class Pass(NamedTuple):
    """The forward or the backward pass of one micro-batch through one stage.

    Attributes:
        is_forward: whether it is the forward pass.
        local_stage: which of the rank's stages, from 0 for the one nearest to the model's first layers.
        micro_batch: of the step, from 0.
    """

    is_forward: bool
    local_stage: int
    micro_batch: int


def passes_of(position: int, degree: int, stages_per_rank: int, num_micro_batches: int) -> list[Pass]:
    """Return the passes of one step in their order: 1F1B, or interleaved 1F1B with several stages per rank.

    After some forward passes, each further one is followed by a backward pass, so that a rank keeps the activations of
    a few micro-batches only. The orders are those of `Schedule1F1B` and `ScheduleInterleaved1F1B` of
    torch.distributed.pipelining (Narayanan et al. 2021), but for any number of micro-batches.

    Args:
        position: of the rank in the pipeline, from 0 for the model's first layers.
        degree: number of positions.
        stages_per_rank: number of stages of each rank.
        num_micro_batches: of this step.
    """
    total = stages_per_rank * num_micro_batches
    behind = degree - 1 - position
    at_once = num_micro_batches // _rounds(degree, num_micro_batches)
    # micro-batches pass through all stages of the ranks before the first of them comes back
    ahead = behind if stages_per_rank == 1 else (stages_per_rank - 1) * at_once + 2 * behind
    ahead = min(ahead, total)
    forward = [Pass(True, *place) for place in _places(stages_per_rank, num_micro_batches, at_once)]
    backward = [
        Pass(False, stages_per_rank - 1 - stage, micro_batch)
        for stage, micro_batch in _places(stages_per_rank, num_micro_batches, at_once)
    ]
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(each for pair in pairs for each in pair), *backward[total - ahead :]]


def _rounds(degree: int, num_micro_batches: int) -> int:
    """The number of equal groups of micro-batches that pass through one stage of each rank before the next stage."""
    most = max(1, num_micro_batches // degree)
    return next(rounds for rounds in range(most, 0, -1) if num_micro_batches % rounds == 0)


def _places(stages_per_rank: int, num_micro_batches: int, at_once: int) -> list[tuple[int, int]]:
    """Stage and micro-batch of all passes in one direction, in the order in which a rank computes them."""
    return [
        (stage, micro_batch)
        for begin in range(0, num_micro_batches, at_once)
        for stage in range(stages_per_rank)
        for micro_batch in range(begin, begin + at_once)
    ]
