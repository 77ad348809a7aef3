"""A Keras 3 model as a torch.nn.Module."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError, TaskError

BACKEND = "KERAS_BACKEND"


def import_keras() -> Any:
    """Import Keras on the torch backend; the import takes about a second.

    Raises:
        ConfigError: Keras isn't installed, or was imported with another backend.
    """
    if "keras" in sys.modules:
        backend = sys.modules["keras"].backend.backend()
    else:
        # otherwise Keras uses the backend in the user's keras.json, and TensorFlow without that file
        backend = os.environ.setdefault(BACKEND, "torch")
    if backend != "torch":
        raise ConfigError(BACKEND, backend, "expected torch", f"set {BACKEND}=torch")
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        remedy = 'pip install "hpctrain[keras]"'
        raise ConfigError("task", "keras", "needs Keras, which isn't installed", remedy) from error
    return keras


class KerasModule(nn.Module):
    """A built Keras model, trained like any other module.

    Keras stores the statistics of batch norm and the states of its seeds as parameters that need no gradient: DDP would
    neither average nor send them, and each rank would evaluate with its own. Here they are buffers, which share their
    memory with Keras's variables: DDP sends rank zero's to all ranks before a forward, evaluation starts with rank
    zero's, and checkpoints contain them. Frozen weights are buffers, too. The optimizer sees trainable variables only.

    Dropout and batch norm follow this module's mode, which is passed to Keras as `training`: `train()` and `eval()`
    have no effect on Keras's own layers. The forward also returns the model's own losses (regularisers, `add_loss`).

    Names are Keras's paths (``conv2d/kernel``), with layers numbered by their order in the model: Keras itself numbers
    them by the layers that the process has made so far.

    Args:
        build: makes the model, on the CPU; the model must be built, with its variables, when it returns.

    Raises:
        ConfigError: Keras can't be used (see `import_keras`).
        TaskError: the model isn't built, or two of its variables have the same name.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        with import_keras().device("cpu"):
            model = build()
        if not getattr(model, "built", False):
            raise TaskError(
                f"the Keras model {model.name} has no variables yet: add an Input, or call the model once on an example"
            )
        # in a tuple: as a submodule it would register all variables a second time, as parameters
        self._model = (model,)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        names = stable_names(variable.path for variable in variables)
        for number, (name, variable) in enumerate(zip(names, variables, strict=True)):
            if number < len(model.trainable_variables):
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value.detach())
        self._sharing = {
            name: (variable, variable.value.dtype) for name, variable in zip(names, variables, strict=True)
        }

    def forward(self, *inputs: Any) -> tuple[Any, Tensor]:
        """The model's output, and the sum of its own losses, a scalar.

        Raises:
            TaskError: nn.DataParallel made this replica, which would share the original's variables.
        """
        (model,) = self._model
        parameter = next(self.parameters(), None)
        if parameter is None:
            raise TaskError("nn.DataParallel can't split a Keras model among GPUs: use parallel=ddp")
        device = parameter.device
        with import_keras().device(str(device)):  # otherwise Keras moves its inputs to its default device
            output = model(*inputs, training=self.training)
            return output, sum(model.losses, start=torch.zeros((), device=device))

    def __deepcopy__(self, memo: object) -> KerasModule:
        # Keras copies through its file format: the copy's variables would not be its parameters
        raise TaskError("a Keras model can't be copied with its weights: use precision=fp32 or bf16")

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> KerasModule:
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            variable, dtype = self._sharing[name]
            if tensor.dtype != dtype:
                raise TaskError(
                    f"the Keras variable {name} became {tensor.dtype}, but Keras still computes in {dtype}: "
                    "use precision=fp32 or bf16, or a dtype policy of Keras"
                )
            # moving a module to a device replaces its buffers
            variable.value.data = tensor.data
        return self


def stable_names(paths: Iterable[str]) -> list[str]:
    """Names of variables by Keras's paths, independent of how many models the process has made.

    Raises:
        TaskError: a path occurs twice.
    """
    renamed: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    names = []
    for path in paths:
        place, parts = "", []
        for part in path.replace(".", "_").split("/"):
            base = re.sub(r"_\d+$", "", part)
            before, place = place, f"{place}/{part}"
            if place not in renamed:
                number = counts[before, base]
                counts[before, base] += 1
                renamed[place] = f"{base}_{number}" if number else base
            parts.append(renamed[place])
        names.append("/".join(parts))
    (name, count), *_ = Counter(names).most_common(1) or [("", 1)]
    if count > 1:
        raise TaskError(f"{count} variables of the Keras model are called {name}: give its layers different names")
    return names
