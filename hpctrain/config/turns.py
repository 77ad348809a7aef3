"""Check what several losses and unfreezing need of the other groups, before anything is written or submitted."""

from __future__ import annotations

from hpctrain.config.named_optimizers import losses_of, named_optimizers
from hpctrain.config.parameter_groups import entries_of
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError

WHOLE_CALLS = "works on calls of the whole model, but with several losses a task calls parts of it"
"""Why some keys are refused with several turns."""


def check_turns(config: Config) -> None:
    """Check the losses of named optimizers, and groups that are unfrozen.

    Raises:
        ConfigError: another key doesn't work with several losses, or with unfreezing.
    """
    optimizers = named_optimizers(config.optimizer)
    if len(losses_of(optimizers)) > 1:
        _check_several_losses(config)
    if config.trainer.compile:
        for each in optimizers:
            for entry in entries_of(each.key, each.node):
                for name in ("unfreeze_at_step", "unfreeze_at_epoch"):
                    if getattr(entry, name) is not None:
                        problem = "doesn't work with trainer.compile=true: the model would have to be compiled again"
                        raise ConfigError(f"{entry.key}.{name}", getattr(entry, name), problem, "set one of them")


def _check_several_losses(config: Config) -> None:
    if (formats := config.precision.formats).has_half_weights:
        remedy = f"use precision={formats.by_autocast}"
        raise ConfigError("precision.kind", formats.kind, WHOLE_CALLS, remedy)
    if (mode := config.trainer.compile_mode) != "default":
        problem = (
            "doesn't work with several losses: it uses CUDA graphs, in which a second call of a part of the model "
            "overwrites the result of the first"
        )
        raise ConfigError("trainer.compile_mode", mode, problem, "set it to default")
    if config.parallel.kind == "data_parallel":
        raise ConfigError("parallel.kind", "data_parallel", WHOLE_CALLS, "use parallel=ddp")
