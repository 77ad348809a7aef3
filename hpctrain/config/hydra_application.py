"""Hydra as hpctrain starts it: with the user's folders, and without what its applications do to folders and logs.

Composing needs Hydra's public modules only. `--info`, `--hydra-help`, completion and foreign sweepers are methods of a
private object; releases may change them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hpctrain.config.paths import conf_dir
from hpctrain.errors import ConfigError

VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""Hydra 1.3 warns without the argument, and later releases warn of it."""


class UserFolders(SearchPathPlugin):
    """Hydra's plugin that has it search the user's folders, too; does nothing in a program's own Hydra application."""

    _folders: ClassVar[tuple[Path | None, Path | None]] = (None, None)

    @classmethod
    @contextlib.contextmanager
    def search(cls, before: Path | None, after: Path | None) -> Iterator[None]:
        """Context manager: if Hydra is initialized in it, it searches these folders, too.

        Args:
            before: searched before hpctrain's own folder; None for none.
            after: searched after it.
        """
        if cls not in Plugins.instance().discover(SearchPathPlugin):
            Plugins.instance().register(cls)
        cls._folders = (before, after)
        try:
            yield
        finally:
            cls._folders = (None, None)

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See Hydra's documentation."""
        before, after = self._folders
        if before is not None:
            search_path.prepend(provider="command-line", path=f"file://{before}", anchor="main")
        if after is not None:
            main = SearchPathQuery(provider="main")
            search_path.append(provider="working-directory", path=f"file://{after}", anchor=main)


class HydraApplication:
    """Hydra, started in this process with hpctrain's configuration.

    Not `@hydra.main`, which changes folders, writes .hydra/ and log files from every rank, exits with 1 after a
    mistake, and in a sweep writes before anything is checked.

    Args:
        before: a folder that is searched before hpctrain's own; None for none.
        after: a folder that is searched after it.

    Attributes:
        loader: composes, and knows the options of groups.
    """

    def __init__(self, before: Path | None, after: Path | None) -> None:
        # Hydra refuses a second instance in a process, and a sweeper or a resume may need one
        GlobalHydra.instance().clear()
        with UserFolders.search(before, after):
            hydra.initialize_config_dir(str(conf_dir()), job_name="hpctrain", **VERSION_BASE)
        self.loader = GlobalHydra.instance().config_loader()
        self._hydra: Any = GlobalHydra.instance().hydra

    def call(self, feature: str, method: str, **arguments: object) -> None:
        """Call a method of the private object.

        Args:
            feature: what the user typed, such as `--info`, for the error.
            method: name of the method.
            arguments: passed to it.

        Raises:
            ConfigError: the installed release has no such method, or one with other arguments. Mistakes in the
                overrides raise `MISTAKES`.
        """
        try:
            function = getattr(self._hydra, method)
            inspect.signature(function).bind(**arguments)
        except (AttributeError, TypeError) as error:
            problem = f"has no {feature} that hpctrain can call"
            remedy = "pip install hydra-core==1.3.8"
            raise ConfigError("hydra-core", hydra.__version__, problem, remedy) from error
        function(**arguments)
