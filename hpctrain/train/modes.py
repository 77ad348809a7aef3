"""Train and evaluation modes of a model's modules: state that no state dict has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hpctrain.checkpoint.state import PlainNames, Stateful
from hpctrain.parallel.trial_pass import attribute_restored
from hpctrain.phrases import counted, listed


class Modes(Stateful):
    """The modes of a model's modules in checkpoints, as the names of those in evaluation mode: usually there are none.

    `requires_grad` isn't saved: the optimizers are built over what requires a gradient at the start.

    Args:
        model: outside of DDP.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state(self) -> dict[str, Any]:
        """Return the names of the modules in evaluation mode."""
        return {"evaluation_mode": names_in_evaluation_mode(self._model)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the mode of every module; names of other models are ignored."""
        if (names := saved.get("evaluation_mode")) is not None:
            plain_name = PlainNames(self._model)
            in_evaluation = set(names)
            for name, module in self._model.named_modules():
                module.training = plain_name(name) not in in_evaluation


def begin_training(model: nn.Module) -> bool:
    """Put a model into the modes in which it is trained, once it is built.

    If the model is in evaluation mode, call its `train()`. Otherwise each module keeps the mode in which it was built:
    `train()`, as a loop by hand calls it, would switch on what the task froze by `eval()`. The exception is a module
    that overrides `train()`: it is called, since it may set the modes of other modules. A program of torch.export is
    trained and evaluated as it was exported, whatever its mode.

    Args:
        model: outside of DDP.

    Returns:
        Whether the model itself was in evaluation mode, as `from_pretrained` returns it.
    """
    if not model.training:
        _set_mode(model, training=True)
        return True
    frozen = [module for module in model.modules() if not module.training]
    unseen = [model]
    while unseen:
        module = unseen.pop()
        if module.training and _overrides_train(module):
            _set_mode(module, training=True)  # also of all modules inside
        else:
            unseen.extend(module.children())
    for module in frozen:
        module.training = False
    return False


def names_in_evaluation_mode(model: nn.Module) -> list[str]:
    """Return the plain names of the modules in evaluation mode, in the model's order; the model's own is ''."""
    plain = PlainNames(model)
    return [plain(name) for name, module in model.named_modules() if not module.training]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that puts all modules into evaluation mode, and afterwards each into its own mode again."""
    was_training = model.training
    # `train` also switches on what a task keeps in evaluation mode, such as frozen batch norms
    with attribute_restored(model.modules(), "training"):
        _set_mode(model, training=False)
        try:
            yield
        finally:
            _set_mode(model, training=was_training)


def describe_evaluation_mode(model: nn.Module) -> str:
    """Describe which modules are in evaluation mode, as ``12 of 40 modules: backbone, head.norm``; empty if none is.

    A module stands for those inside it if none of them trains.
    """
    names = names_in_evaluation_mode(model)
    if not names:
        return ""
    plain, modules = PlainNames(model), dict(model.named_modules())
    subtrees = {plain(name) for name, module in modules.items() if not any(part.training for part in module.modules())}
    # a wrapper of torch.compile has the name of the module inside it
    outermost = [name for name in dict.fromkeys(names) if not name or name.rpartition(".")[0] not in subtrees]
    return f"{len(names)} of {counted(len(modules), 'module')}: {listed(name or '(the model)' for name in outermost)}"


@contextmanager
def frozen_batch_norms(model: nn.Module) -> Iterator[None]:
    """Context in which batch norms use their running statistics without updating them, except `SyncBatchNorm`."""
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.training
    ]
    with attribute_restored(norms, "training"):
        for norm in norms:
            norm.training = False
        yield


def _overrides_train(module: nn.Module) -> bool:
    # of the instance and not of its class: some assign a `train` that does nothing to a part that must stay frozen
    return getattr(module.train, "__func__", None) is not nn.Module.train


def _set_mode(model: nn.Module, *, training: bool) -> None:
    try:
        # not train(False): a module may override only `train` or only `eval`
        model.train() if training else model.eval()
    except NotImplementedError:
        # a program of torch.export raises this, and the modules after it are left as they were
        for module in model.modules():
            module.training = training
