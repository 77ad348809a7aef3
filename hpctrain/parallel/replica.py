"""This rank's replica of the model, or its share of one: what a training asks of the ranks that compute with it.

Why it is like this: docs/adr/0037-one-room-for-each-thing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel

from hpctrain.parallel.local_part import local_part, whole

if TYPE_CHECKING:  # of the rooms above, whose objects a replica passes through
    from hpctrain.data.micro_batch import MicroBatch
    from hpctrain.train.profiling.sampler import PartTimer


class LossModule(nn.Module):
    """A module whose forward pass is a whole loss, so that DDP surrounds all calls of the model and its parts at once.

    With DDP around the model, the buffers that it sends before a second call would break the graph of the first, and a
    task that calls the model inside the wrapper would train another model on each rank, without an error.

    Args:
        module: with which the loss is computed.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # DDP asks only the module that it wraps which names to leave out
        ignored: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    def forward(self, compute: Callable[[nn.Module], Tensor]) -> Tensor:
        """Call ``compute``, which returns a loss, with the module."""
        return compute(self._modules["module"])  # type: ignore[arg-type]  # the constructor sets it

    # nothing hooks this module, and torch's way from a call to `forward` costs a few microseconds in each step
    __call__ = forward


class AutocastDataParallel(parallel.DataParallel[nn.Module]):
    """nn.DataParallel whose threads also use the caller's autocast format.

    torch's `parallel_apply` passes on only whether autocast is enabled; the format is a thread's own, so that bf16
    would silently become fp16, without a loss scale. Other state of a thread, such as `torch.overrides` modes, isn't
    passed on. Replicas share the model's attributes, so a bound method in an attribute uses the first GPU's weights.
    """

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each replica in a thread of its own."""
        calls: Any = [with_callers_autocast(replica, "cuda") for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def with_callers_autocast(compute: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Wrap a function so that it runs under this thread's autocast settings, whichever thread calls it.

    Args:
        compute: the function.
        device_type: the autocast's.
    """
    if not torch.is_autocast_enabled(device_type):
        return compute
    dtype = torch.get_autocast_dtype(device_type)

    def computing(*arguments: Any, **options: Any) -> Any:
        # a context for each call: it keeps what it restores in itself
        with torch.autocast(device_type, dtype=dtype):
            return compute(*arguments, **options)

    return computing


def inner(model: nn.Module) -> nn.Module:
    """The model inside DDP's and torch.compile's wrappers, whose names checkpoints use."""
    while True:
        wrapped = isinstance(model, DistributedDataParallel | AutocastDataParallel | LossModule)
        inside = model.module if wrapped else getattr(model, "_orig_mod", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside


Call: TypeAlias = Callable[[Callable[[nn.Module], Any]], Any]
"""Calls a function with the model, as a `LossModule` does."""


Accumulating: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes a context for the passes of all micro-batches but a step's last, in which gradients aren't reduced, or less."""


class Passes(Protocol):
    """The passes of one loss over the micro-batches of a step: a turn."""

    def compute(self, micro_batch: MicroBatch, timer: PartTimer | None) -> None:
        """Add the gradients of a micro-batch to those of the step."""

    def begin_parts(self, micro_batches: Sequence[MicroBatch], timer: PartTimer | None) -> PartPasses:
        """Return the passes of a step for a rank that computes parts of them."""


class PartPasses(Protocol):
    """The passes of a step through parts of the model, of which only the last one has the loss."""

    def forward(self, call: Call, number: int, *, has_loss: bool, is_repeated: bool) -> Any:
        """Compute the task's loss as far as a part of the model goes.

        Args:
            call: computes one part.
            number: of the micro-batch in the step.
            has_loss: whether the part is the last one.
            is_repeated: whether the task's code runs again for this micro-batch, and counts only then.
        """

    def backward(self, output: Any, gradients: Sequence[Tensor] | None, number: int) -> None:
        """Add the gradients of a part of the model.

        Args:
            output: tensors that got gradients from the next part, or the loss.
            gradients: of these tensors; None for the loss.
            number: of the micro-batch in the step.
        """


EvaluationContext: TypeAlias = Callable[[bool, bool], AbstractContextManager[object]]
"""Makes the context for one part of an evaluation pass, from `has_results` and `is_repeated`."""


class Replica:
    """A replica that one rank computes alone: the protocol, and what it is without other ranks.

    Other replicas derive from it: `DdpReplica`, `DataParallelReplica`, `FsdpReplica` (whose ranks may also divide
    layers), `PipelineReplica`. `train.build.build_network` chooses it, by the kind in `config.parallel` and the mesh;
    nothing else outside of this room asks which one it has.

    Args:
        model: that forward passes go through, with or without wrappers.

    Attributes:
        model: without wrappers.
        is_shared: whether other ranks hold parts of the model. Then every call of it is collective, also one without
            gradients, weights are DTensors, and each rank saves its own part.
        is_mixed: whether ranks have different parameters, or share them in different ways: an overflow of one is
            unknown to the others.
        divides_results: whether what the model returns may be DTensors, of which other ranks hold parts.
        has_results: whether this rank gets the losses and the results of evaluations.
        counts_flops: whether each rank computes an equal part of a sample.
        in_threads: whether threads of their own call the model.
        num_ranks: ranks that hold the replica together.
        copies: names of this rank's parameters that another rank saves.
    """

    is_shared = False
    is_mixed = False
    divides_results = False
    has_results = True
    counts_flops = True
    in_threads = False
    num_ranks = 1
    copies: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self.model = inner(model)

    def build_loss_module(self, model: nn.Module, before: nn.Module | None = None) -> nn.Module:
        """Return a module that calls a function with the model, over the parameters that require gradients; collective.

        Args:
            model: of this replica.
            before: an earlier result, which is no longer used.
        """
        return LossModule(model)

    def accumulating(self, loss_module: nn.Module) -> Accumulating | None:
        """Return how gradients are accumulated; None if each micro-batch reduces its own.

        Args:
            loss_module: of `build_loss_module`.
        """
        return None

    def fix_layout(self, loss_module: nn.Module, backward: Callable[[], None]) -> None:
        """Reach the layout in which all steps are computed, before the first one; collective.

        Args:
            loss_module: of `build_loss_module`.
            backward: one forward and backward pass of this rank, of which nothing is kept.
        """

    def accumulate(
        self,
        passes: Passes,
        step: int,
        micro_batches: Iterator[MicroBatch],
        accumulating: Accumulating | None,
        timer: PartTimer | None,
    ) -> float:
        """Compute the gradients of a step; collective.

        Args:
            passes: of the loss.
            step: its number, from 0.
            micro_batches: of this rank; those of the step are consumed.
            accumulating: of the loss module.
            timer: times the parts of this step; None for no timing.

        Returns:
            The factor by which to rescale the gradients.
        """
        for micro_batch in micro_batches:
            if timer is not None:
                timer.mark("data")
            # no_sync has to enclose forward and backward: DDP decides in the forward pass whether the backward sends
            if micro_batch.is_last or accumulating is None:
                passes.compute(micro_batch, timer)
            else:
                with accumulating():
                    passes.compute(micro_batch, timer)
            if micro_batch.is_last:
                break
        return micro_batch.gradient_factor

    def clip(self, parameters: Sequence[Tensor], max_norm: float | None) -> Tensor | None:
        """Clip the gradients of parameters by their total norm, without waiting for the device; collective.

        Args:
            parameters: those without a gradient are left out.
            max_norm: the bound; None to only measure the norm.

        Returns:
            The 2-norm before clipping, 0-d; None where nothing has a gradient.
        """
        if max_norm is not None:
            return whole(nn.utils.clip_grad_norm_(parameters, max_norm))
        return whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def try_gradients(self, compute: Callable[[nn.Module], Tensor], parameters: Sequence[nn.Parameter]) -> None:
        """Compute gradients in a pass of which nothing is kept, without averaging them; collective if the model is.

        Args:
            compute: returns the loss, given what `build_loss_module` returns.
            parameters: that require gradients.
        """
        torch.autograd.grad(compute(LossModule(self.model)), parameters, allow_unused=True)

    def evaluate(
        self, prepare: Callable[[], Callable[[nn.Module], Any]], batch: Any, number: int, context: EvaluationContext
    ) -> Any:
        """Evaluate a batch, without gradients; collective if the model is.

        Args:
            prepare: moves the batch to the device, and returns a function that evaluates it with the model.
            batch: on the CPU.
            number: of the batch in this evaluation.
            context: see `EvaluationContext`.

        Returns:
            What the function returns; None without `has_results`.
        """
        return prepare()(self.model)

    def loading(self, number: int) -> AbstractContextManager[object]:
        """Return the context in which to load a batch of an evaluation.

        Args:
            number: of the batch.
        """
        return nullcontext()

    def send_buffers(self) -> None:
        """Give the ranks that hold the same part of the model the buffers of the first one; collective."""

    def calls(self) -> AbstractContextManager[None]:
        """Return a context in which the model may be called without gradients; collective, as are the calls."""
        return nullcontext()

    def gradient_bytes(self, parameter: Tensor, *, accumulates: bool) -> int:
        """Return the bytes that this rank holds of a gradient before the update.

        Args:
            parameter: whose gradient it is.
            accumulates: whether a step has several micro-batches.
        """
        return local_part(parameter).nbytes

    def describe(self, hosts: Sequence[str]) -> str:
        """Describe in one line which ranks share the model; empty if each has a replica.

        Args:
            hosts: of all ranks, in rank order.
        """
        return ""
