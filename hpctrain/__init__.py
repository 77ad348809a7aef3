"""hpctrain: train PyTorch models on SLURM, from the command line, a program or a notebook."""

from hpctrain.startup import __version__ as __version__

# not typing's, and not `from __future__`: nothing is imported here that could come from the working directory, which
# `hpctrain.__main__` removes from Python's search path only afterwards
TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpctrain.api.composition import compose as compose
    from hpctrain.api.run import Run as Run
    from hpctrain.api.run import fit as fit
    from hpctrain.api.run import submit as submit
    from hpctrain.config.root import Config as Config
    from hpctrain.errors import ConfigError as ConfigError
    from hpctrain.errors import HpctrainError as HpctrainError
    from hpctrain.errors import RunFailedError as RunFailedError
    from hpctrain.run.checkpoints import CheckpointInfo as CheckpointInfo
    from hpctrain.status.run_status import RunStatus as RunStatus
    from hpctrain.status.state import RunState as RunState

_MODULES = {
    "CheckpointInfo": "run.checkpoints",
    "Config": "config.root",
    "ConfigError": "errors",
    "HpctrainError": "errors",
    "Run": "api.run",
    "RunFailedError": "errors",
    "RunState": "status.state",
    "RunStatus": "status.run_status",
    "compose": "api.composition",
    "fit": "api.run",
    "submit": "api.run",
}
"""Names that are loaded when they are first used: the ranks and the command line import this package as well."""

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - names


if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        attribute = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = attribute
        return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
