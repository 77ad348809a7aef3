"""A pipeline: this rank's stages of a model, and what they exchange with those of its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.distributed.gradients import total_norm
from hpctrain.distributed.local_part import local_part
from hpctrain.distributed.pipeline.neighbours import Neighbours
from hpctrain.distributed.pipeline.random_streams import RandomStreams
from hpctrain.distributed.pipeline.schedule import Pass, passes_of
from hpctrain.distributed.pipeline.stages import Activations, Stages, forward_replaced
from hpctrain.distributed.pipeline.wire import Arrival, Form
from hpctrain.errors import TaskError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
"""Of what a model may return to a callback."""
MOST_DIMENSIONS = 8
"""Of what a model may return to a callback."""

Replica: TypeAlias = Callable[[Callable[[nn.Module], Any]], Any]
"""Calls a function with the model, as a `LossModule` does."""


class StepWork(Protocol):
    """What a step computes in the passes of a pipeline."""

    def forward(self, replica: Replica, own: int, micro_batch: int) -> Any:
        """Compute the task's loss with the replica, and return the result of that: activations, or the loss.

        Args:
            replica: computes one stage.
            own: which of this rank's stages.
            micro_batch: of the step.
        """

    def backward(self, found: Any, gradients: Sequence[Tensor] | None, micro_batch: int) -> None:
        """Add the gradients of a stage.

        Args:
            found: activations that got gradients from the next stage, or the loss in the last one.
            gradients: of the activations; None in the last stage.
            micro_batch: of the step.
        """


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
        root: calls a function with the model, whose weights are gathered as needed.
        stages: of this rank.
        neighbours: of this rank.
        streams: of random numbers.
        group: of the ranks of a pipeline.
        device: of this rank.
        shared: parameters of this rank that other positions have as well, with the group of these ranks.

    Attributes:
        stages: as given.
        device: as given.
    """

    def __init__(
        self,
        root: Replica,
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
        self._neighbours = neighbours
        self._streams = streams
        self._group = group
        self._shared = shared
        self._counted_elsewhere = {
            id(parameter)
            for name, parameter in stages.model.named_parameters(remove_duplicate=False)
            if name in stages.copies
        }
        self._arrivals: dict[Pass, Arrival] = {}
        self._open: dict[tuple[int, int], _OpenPass] = {}

    def step(self, work: StepWork, keys: Sequence[Hashable], first_number: int) -> None:
        """Compute the gradients of one step; collective.

        Args:
            work: what is computed.
            keys: of the micro-batches; equal for those of equal shapes.
            first_number: of the first micro-batch, for the random numbers of the task.
        """
        own = self._neighbours
        passes = passes_of(own.position, own.degree, self.stages.num_own, len(keys))
        for each, following in zip_longest(passes, passes[1:]):
            # in the order in which it is sent: not before this pass has begun to receive
            if self._begin_receiving(each, keys) and following is not None:
                self._begin_receiving(following, keys)
            place = each.stage, each.micro_batch
            if each.is_forward:
                self._open[place] = self._forward(each, work, keys, first_number + each.micro_batch)
            else:
                self._backward(each, work, self._open.pop(place))
        own.finish()
        self._add_up_shared()

    def total_norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the 2-norm of the gradients of all stages, 0-d, the same on every rank; collective.

        Args:
            gradients: of this rank's parameters.
        """
        counted = [gradient for own, gradient in gradients.items() if id(own) not in self._counted_elsewhere]
        norm = total_norm(counted) if counted else torch.zeros((), device=self.device)
        square = norm.double().square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt().to(norm.dtype)

    def evaluate(self, compute: Callable[[nn.Module], Any], key: Hashable, number: int) -> Any:
        """Compute one batch in all stages of this rank, without gradients; collective.

        Args:
            compute: calls the model exactly once.
            key: of the batch; equal for batches of equal shapes.
            number: of the batch, for the random numbers of the task.

        Returns:
            What `compute` returns, where the last stage is; None elsewhere.
        """
        found = None
        for own in range(self.stages.num_own):
            each = _OpenPass()
            receive = partial(self._receive, each, Pass(True, own, 0), key)
            found = self._in_stage(own, number, receive, compute)
            if not self.stages.ends(own):
                self._pass_on(own, key, found)
                found = None
        return found

    @contextmanager
    def calls(self, key_of: Callable[[Any], Hashable]) -> Iterator[None]:
        """Inside the context, the model may be called on all ranks alike; each gets what the last stage returns.

        Args:
            key_of: returns a key of the arguments, equal for those of equal shapes.
        """
        forward = self.stages.model.forward

        def through_all_stages(*arguments: Any, **options: Any) -> Tensor:
            key, found = key_of((arguments, options)), None
            for own in range(self.stages.num_own):
                receive = partial(self._receive, _OpenPass(), Pass(True, own, 0), key)
                found = self.stages.forward(own, forward, receive, arguments, options)
                if not self.stages.ends(own):
                    self._pass_on(own, key, found)
            return self._told(found)

        with forward_replaced(self.stages.model, through_all_stages):
            yield

    def _told(self, found: Any) -> Tensor:
        """Return on all ranks of the pipeline what the last stage has found."""
        head = torch.zeros(2 + MOST_DIMENSIONS, dtype=torch.int64, device=self.device)
        if self.stages.is_last:
            if not isinstance(found, Tensor) or found.dim() > MOST_DIMENSIONS:
                raise TaskError(
                    f"in a pipeline, a callback can only call a model that returns a tensor; this one returns "
                    f"{type(found).__name__}"
                )
            head[: 2 + found.dim()] = torch.tensor([DTYPES.index(found.dtype), found.dim(), *found.shape])
        # the last position has the lowest rank
        dist.broadcast(head, group=self._group, group_src=0)
        dtype, dim, *sizes = head.tolist()
        if not self.stages.is_last:
            found = torch.empty(sizes[:dim], dtype=DTYPES[dtype], device=self.device)
        found = found.contiguous()
        dist.broadcast(found, group=self._group, group_src=0)
        told: Tensor = found
        return told

    def _forward(self, current: Pass, work: StepWork, keys: Sequence[Hashable], number: int) -> _OpenPass:
        own, key = current.stage, keys[current.micro_batch]
        each = _OpenPass()
        receive = partial(self._receive, each, current, key)
        each.output = work.forward(partial(self._in_stage, own, number, receive), own, current.micro_batch)
        if not self.stages.ends(own):
            self._pass_on(own, key, each.output)
        return each

    def _backward(self, current: Pass, work: StepWork, each: _OpenPass) -> None:
        own = current.stage
        if self.stages.ends(own):
            work.backward(each.output, None, current.micro_batch)
        else:
            gradients = self._arrivals.pop(current).wait()
            if awaited := each.awaited:
                work.backward(awaited, gradients, current.micro_batch)
        wanted = [tensor for tensor in each.given if tensor.requires_grad]
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanted]
        self._neighbours.to_before.send(gradients)

    def _begin_receiving(self, each: Pass, keys: Sequence[Hashable]) -> bool:
        """Begin to receive what a pass needs, so that it comes while the pass before computes.

        Returns:
            Whether there is nothing left to receive for this pass.
        """
        own = each.stage
        if each in self._arrivals or (self.stages.begins(own) if each.is_forward else self.stages.ends(own)):
            return True
        if each.is_forward:
            kind = self.stages.index(own), keys[each.micro_batch], torch.is_grad_enabled()
            wire = self._neighbours.from_before
            if not wire.knows(kind):
                return False
            self._arrivals[each] = wire.expect(wire.forms(kind))
        else:
            opened = self._open.get((own, each.micro_batch))
            if opened is None:
                return False
            self._arrivals[each] = self._expect_gradients(opened.awaited)
        return True

    def _expect_gradients(self, awaited: Sequence[Tensor]) -> Arrival:
        return self._neighbours.from_next.expect([Form.of(tensor) for tensor in awaited])

    def _in_stage(
        self, own: int, number: int, receive: Callable[[], Activations], compute: Callable[[nn.Module], Any]
    ) -> Any:
        stages, streams = self.stages, self._streams
        with streams.of_task(number):
            return self._root(lambda model: stages.compute(own, compute, receive, streams, model))

    def _receive(self, each: _OpenPass, current: Pass, key: Hashable) -> Activations:
        """Wait for the activations of the stage before."""
        wire = self._neighbours.from_before
        forms = wire.forms((self.stages.index(current.stage), key, torch.is_grad_enabled()))
        arrival = self._arrivals.pop(current, None) or wire.expect(forms)
        each.given = arrival.wait()
        for tensor, form in zip(each.given, forms, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return tuple(each.given) if len(each.given) > 1 else each.given[0]

    def _pass_on(self, own: int, key: Hashable, output: Activations) -> None:
        kind = self.stages.index(own) + 1, key, torch.is_grad_enabled()
        self._neighbours.to_next.send_described(kind, _as_tuple(output))

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
