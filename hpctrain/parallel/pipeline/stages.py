"""The stages of a model that this rank has, and a forward pass through one of them.

Why it is like this: docs/adr/0024-models-sharded-over-a-mesh.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.local_part import is_dtensor
from hpctrain.parallel.pipeline.plan import is_inside
from hpctrain.parallel.pipeline.random_streams import RandomStreams
from hpctrain.phrases import listed

NOT_CALLED = (
    "in a pipeline, loss and evaluate must call model(...) exactly once, and this task hasn't called it, or only its "
    "parts"
)

Activations: TypeAlias = Tensor | tuple[Tensor, ...]
"""What a stage returns, and the next one gets in the place of the model's first argument."""
_NOTHING = object()


class Stage:
    """A stage of this rank, with placeholders for the modules of other stages.

    A placeholder returns its first argument. That is right only where each module continues with what the one before
    has returned: `x + self.attention(x)` would become `x + x`. So the stage checks what passes through them.

    Args:
        model: whole.
        names: modules and parameters of each stage of the pipeline.
        index: number of the stage.

    Attributes:
        index: as given.
        is_first: whether it is the first of the pipeline.
        is_last: whether it is the last of the pipeline.
    """

    def __init__(self, model: nn.Module, names: Sequence[Sequence[str]], index: int) -> None:
        self.index = index
        self.is_first = index == 0
        self.is_last = index == len(names) - 1
        self._placeholders = _placeholders(model, names, self)
        self._inputs: Any = None
        self._leaves: Any = _NOTHING

    def call(
        self, forward: Callable[..., Any], inputs: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Call the model's forward in this stage.

        Args:
            forward: of the whole model.
            inputs: the activations of the stage before; None in the first one.
            arguments: of the call.
            options: of the call, by name.

        Raises:
            TaskError: a stage before the last one returns something else than tensors, or what the model returns has
                changed after its last module.
        """
        self._inputs = inputs
        self._leaves = _NOTHING
        with self._without_others():
            output = forward(*arguments, **options)
        if self.is_last:
            return output
        activations = _checked(output)
        if self._leaves is not _NOTHING and output is not self._leaves:
            raise self._broken("", "what this stage has computed")
        self._inputs = None
        self._leaves = _NOTHING
        return activations

    def pass_through(self, name: str, value: Any, *, is_earlier: bool) -> Any:
        """Return the first argument of a call of a placeholder.

        Args:
            name: of the module.
            value: the argument.
            is_earlier: whether an earlier stage has the module.

        Raises:
            TaskError: it isn't what the stage before returned, or in the place of a later module, not what this stage
                has computed.
        """
        if is_earlier:
            if value is not self._inputs:
                raise self._broken(name, "what the stage before returned")
        elif self._leaves is _NOTHING:
            self._leaves = value
        elif value is not self._leaves:
            raise self._broken(name, "what this stage has computed")
        return value

    @contextmanager
    def _without_others(self) -> Iterator[None]:
        before = [parent._modules[name] for parent, name, _ in self._placeholders]
        for parent, name, placeholder in self._placeholders:
            parent._modules[name] = placeholder
        try:
            yield
        finally:
            for (parent, name, _), module in zip(self._placeholders, before, strict=True):
                parent._modules[name] = module

    def _broken(self, name: str, expected: str) -> TaskError:
        where = (
            f"calls {name}, which another stage has, with something else than"
            if name
            else "returns something else than"
        )
        return TaskError(
            f"in stage {self.index} of the pipeline, the model {where} {expected}: code between modules that belongs "
            f"to other stages needs a condition, such as `if self.{name or 'head'}:`"
        )


class Placeholder(nn.Module):
    """Stands in for a module of another stage: returns its first argument; `bool()` is False.

    Args:
        name: of the module.
        stage: in which it stands.
        is_earlier: whether an earlier stage has the module.
    """

    def __init__(self, name: str, stage: Stage, *, is_earlier: bool) -> None:
        super().__init__()
        self.name = name
        self._stage = stage
        self._is_earlier = is_earlier

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return the first argument.

        Raises:
            TaskError: it isn't the activations that pass through.
        """
        first = next(iter((*arguments, *options.values())), None)
        return self._stage.pass_through(self.name, first, is_earlier=self._is_earlier)

    def __bool__(self) -> bool:
        """Whether this stage has the module."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Say that the module isn't here.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            f"another stage of the pipeline has the module {self.name}, whose {name} the model uses: put "
            f"`if self.{self.name}:` around that, or name it in pipeline_plan in all stages that use it"
        )


class _StageDone(BaseException):
    """Leaves the task's code with what a stage has computed; not an Exception, which that code might catch."""

    def __init__(self, output: Activations) -> None:
        self.output = output
        super().__init__()


class Stages:
    """The stages of this rank.

    The model keeps all of its modules, so that names, parameter groups and checkpoints are those of the whole model:
    any mesh can resume from them.
    Parameters and buffers that only other ranks have stay on the `meta` device, without memory. During the pass of a
    stage, placeholders take the places of the modules that this stage doesn't have.

    Args:
        model: whole, on any device.
        names: modules and parameters of each stage of the pipeline (`plan.stages_of`).
        position: of this rank in the pipeline, from 0 for the model's first layers.
        degree: number of positions; position p has the stages p, p + degree, p + 2 * degree and so on.

    Attributes:
        model: as given.
        local: the stages of this rank, in their order.
        is_last: whether this rank has the last stage, which computes the loss.
        shared: positions that have a parameter together, by the first one of its names.
        copies: names of parameters that this rank has, but for whose contents in checkpoints another position counts.
    """

    def __init__(self, model: nn.Module, names: Sequence[Sequence[str]], position: int, degree: int) -> None:
        self.model = model
        self.local = [Stage(model, names, index) for index in range(position, len(names), degree)]
        self._names = list(dict.fromkeys(name for stage in names for name in stage))
        self.is_last = position == degree - 1
        parameters = inspect.signature(model.forward).parameters
        self._first_argument = next(iter(parameters), "")
        holders = _holders(model, names, degree)
        self._absent = {name for name, positions in holders.items() if position not in positions}
        together = {name: positions for name, positions in holders.items() if len(positions) > 1}
        self.copies = frozenset(name for name, positions in together.items() if positions[0] < position in positions)
        first_names = {name for name, _ in model.named_parameters()}
        self.shared = {name: positions for name, positions in together.items() if name in first_names}

    def absent_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that only other ranks have."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        return {parameter for name, parameter in parameters if name in self._absent}

    @contextmanager
    def absent_set_aside(self) -> Iterator[None]:
        """Context manager that takes out of the model the parameters and buffers that only other ranks have."""
        aside = []
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and f"{prefix}{name}" in self._absent:
                        aside.append((tensors, name, tensor))
                        tensors[name] = None
        try:
            yield
        finally:
            for tensors, name, tensor in aside:
                tensors[name] = tensor

    def require_whole(self, names: Iterable[str]) -> None:
        """Refuse modules that the pipeline cuts, where they have to be whole.

        Args:
            names: of modules whose activations are recomputed.

        Raises:
            ConfigError: a module contains others that stages have.
        """
        for name in names:
            inside = [inner for inner in self._names if inner.startswith(f"{name}.")]
            if inside:
                problem = f"is cut by the pipeline, between {listed(inside, max_names=4)}"
                raise ConfigError("trainer.activation_checkpointing", name, problem, f"write {name}.*")

    def compute(
        self,
        local_stage: int,
        compute: Callable[[nn.Module], Any],
        receive: Callable[[], Activations],
        streams: RandomStreams,
        model: nn.Module,
    ) -> Any:
        """Compute one of this rank's stages in the task's code, inside of `RandomStreams.of_task`.

        Args:
            local_stage: which of this rank's stages.
            compute: calls the model exactly once.
            receive: returns the activations of the stage before; not called in the first one.
            streams: of this rank.
            model: with which `compute` is called.

        Returns:
            What `compute` returns, in the last stage; in others the activations, and `compute` ends at its call of the
            model.

        Raises:
            TaskError: `compute` doesn't call the model, or does so twice, or a stage returns something else than
                tensors.
        """
        calls: list[None] = []
        forward = model.forward

        def forward_of_stage(*arguments: Any, **options: Any) -> Any:
            if calls:
                raise TaskError(
                    "in a pipeline, loss and evaluate must call model(...) exactly once, and this task calls it twice: "
                    "join the two batches, or use parallel=fsdp"
                )
            calls.append(None)
            with streams.of_layers():
                activations = self.forward(local_stage, forward, receive, arguments, options)
            if self.local[local_stage].is_last:
                return activations
            raise _StageDone(activations)

        with forward_replaced(model, forward_of_stage):
            try:
                output = compute(model)
            except _StageDone as done:
                return done.output
            except RuntimeError as error:
                # torch's, of weights that other ranks have
                if calls or "meta" not in str(error):
                    raise
                raise TaskError(f"{NOT_CALLED}: {error}") from error
        if not calls:
            raise TaskError(NOT_CALLED)
        return output

    def forward(
        self,
        local_stage: int,
        forward: Callable[..., Any],
        receive: Callable[[], Activations],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Call the model's forward for one of this rank's stages.

        Args:
            local_stage: which of this rank's stages.
            forward: of the whole model.
            receive: returns the activations of the stage before; not called in the first one.
            arguments: of the call.
            options: of the call, by name.

        Raises:
            TaskError: a stage before the last one returns something else than tensors.
        """
        stage, activations = self.local[local_stage], None
        if not stage.is_first:
            activations = receive()
            if arguments:
                arguments = (activations, *arguments[1:])
            else:
                options = {**options, self._first_argument: activations}
        return stage.call(forward, activations, arguments, options)


@contextmanager
def forward_replaced(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context manager that replaces a module's forward by another function."""
    override = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        if override is None:
            del model.forward
        else:
            model.forward = override


def _placeholders(
    model: nn.Module, names: Sequence[Sequence[str]], stage: Stage
) -> list[tuple[nn.Module, str, Placeholder]]:
    """Return placeholders for the modules that a stage doesn't have, and where they are: in which module, as what."""
    modules = dict(model.named_modules(remove_duplicate=False))
    absent = {name for entries in names for name in entries if name in modules}.difference(names[stage.index])
    placeholders = []
    for name in sorted(absent):
        if any(is_inside(entry, name) or is_inside(name, entry) for entry in names[stage.index]):
            continue
        path, _, attribute = name.rpartition(".")
        is_earlier = min(number for number, entries in enumerate(names) if name in entries) < stage.index
        placeholders.append((modules[path], attribute, Placeholder(name, stage, is_earlier=is_earlier)))
    return placeholders


def _holders(model: nn.Module, names: Sequence[Sequence[str]], degree: int) -> dict[str, tuple[int, ...]]:
    """Return the positions that have each parameter and buffer, by all of its names, in ascending order.

    What no stage names belongs to the model itself, and is at all positions.
    """
    positions: dict[int, set[int]] = {}
    ids: dict[str, int] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        ids[name] = id(tensor)
        holders = positions.setdefault(id(tensor), set())
        stages = [index for index, entries in enumerate(names) if any(is_inside(name, entry) for entry in entries)]
        holders.update(index % degree for index in stages or (() if "." in name else range(degree)))
    return {name: tuple(sorted(positions[key])) for name, key in ids.items()}


def _checked(output: Any) -> Activations:
    tensors = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(tensor, Tensor) and not is_dtensor(tensor) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise TaskError(
            f"a stage of the pipeline returned {kinds}: the model must return a tensor or a tuple of tensors to the "
            "next stage, and only in its last stage what the task expects"
        )
    # of a view, FSDP2 warns that changes in place would harm it
    activations = tuple(tensor.clone() if tensor._is_view() else tensor for tensor in tensors)
    return activations if len(activations) > 1 else activations[0]
