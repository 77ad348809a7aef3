"""Placeholders for the modules of other stages."""

from __future__ import annotations

from typing import Any

from torch import nn

from hpctrain.errors import TaskError

_NOTHING = object()


class Chain:
    """Checks that a model passes activations from one module to the next through the placeholders of a stage.

    A placeholder returns its first argument. That is right only where each module continues with what the one before
    has returned: `x + self.attention(x)` would become `x + x`.

    Args:
        stage: number of the stage.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._given: Any = None
        self._leaves: Any = _NOTHING

    def begin(self, given: Any) -> None:
        """Begin a pass.

        Args:
            given: the activations of the stage before.
        """
        self._given, self._leaves = given, _NOTHING

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
            if value is not self._given:
                raise self._broken(name, "what the stage before returned")
        elif self._leaves is _NOTHING:
            self._leaves = value
        elif value is not self._leaves:
            raise self._broken(name, "what this stage has computed")
        return value

    def end(self, output: Any) -> None:
        """Check what the model returns at the end of this stage.

        Raises:
            TaskError: it has changed after the last module of the stage.
        """
        if self._leaves is not _NOTHING and output is not self._leaves:
            raise self._broken("", "what this stage has computed")
        self._given, self._leaves = None, _NOTHING

    def _broken(self, name: str, expected: str) -> TaskError:
        where = (
            f"calls {name}, which another stage has, with something else than"
            if name
            else "returns something else than"
        )
        return TaskError(
            f"in stage {self._stage} of the pipeline, the model {where} {expected}: code between modules that belongs "
            f"to other stages needs a condition, such as `if self.{name or 'head'}:`"
        )


class Placeholder(nn.Module):
    """Stands in for a module of another stage: returns its first argument; `bool()` is False.

    Args:
        name: of the module.
        chain: of the stage.
        is_earlier: whether an earlier stage has the module.
    """

    def __init__(self, name: str, chain: Chain, *, is_earlier: bool) -> None:
        super().__init__()
        self.name = name
        self._chain = chain
        self._is_earlier = is_earlier

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return the first argument.

        Raises:
            TaskError: it isn't the activations that pass through.
        """
        first = next(iter((*arguments, *options.values())), None)
        return self._chain.pass_through(self.name, first, is_earlier=self._is_earlier)

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
