"""Several tests of a module at the same time, each on a sandbox of its own.

An interruption is mostly waiting: for a requeued job, for a dead node to be noticed. A test that is decorated with
`staged` plays in a thread, beside others of its module; as a test it waits for its end. After each of them nothing may
be left on its nodes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disk import Disk
from stage import Stage, Straight
from traces import assert_nothing_is_left

if TYPE_CHECKING:
    from conftest import SlurmSandbox

AT_ONCE = 4


@dataclass(frozen=True)
class Script:
    """What a staged test plays: a function of a `Stage`, the options of its sandbox, whether it has a disk."""

    play: Callable[..., None]
    options: tuple[str, ...]
    disk: bool


def staged(*options: str, disk: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that takes a `Stage`, on a sandbox with these options.

    Args:
        options: of the sandbox.
        disk: whether the runs are on a small disk of their own.
    """

    def wrap(play: Callable[..., None]) -> Callable[..., None]:
        def test(performances: dict[str, Future[None]], request: pytest.FixtureRequest, **_: object) -> None:
            performances[request.node.nodeid].result()

        own = [p for name, p in inspect.signature(play).parameters.items() if name != "stage"]
        fixtures = [p for name, p in inspect.signature(test).parameters.items() if name != "_"]
        test.__signature__ = inspect.Signature([*fixtures, *own])  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__doc__ = play.__name__, play.__qualname__, play.__doc__
        test.__module__, test.script = play.__module__, Script(play, options, disk)  # type: ignore[attr-defined]
        return test

    return wrap


def perform(request: pytest.FixtureRequest, sandbox: SlurmSandbox, home: Path) -> Iterator[dict[str, Future[None]]]:
    """Play the staged tests of a module that were selected; the generator of its fixture `performances`."""
    mine = [one for one in request.session.items if isinstance(one, pytest.Function) and one.module is request.module]
    straight = Straight(home)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        playing = {
            one.nodeid: pool.submit(_play, one, type(sandbox), f"{sandbox.name}-s{number}", home, straight)
            for number, one in enumerate(one for one in mine if hasattr(one.function, "script") and not skipped(one))
        }
        yield playing
        pool.shutdown(cancel_futures=True)


def skipped(item: pytest.Item) -> bool:
    """Whether a test was marked to be left out."""
    return any(item.iter_markers("skip"))


def _play(test: pytest.Function, make: type[SlurmSandbox], name: str, home: Path, straight: Straight) -> None:
    script: Script = test.function.script
    parameters: dict[str, Any] = dict(test.callspec.params) if hasattr(test, "callspec") else {}
    folder = home / re.sub(r"\W+", "_", test.name)
    folder.mkdir()
    with ExitStack() as leave:
        disk = Disk(folder / "disk") if script.disk else None
        if disk is not None:
            leave.callback(disk.remove)
        own = make(name, *parameters.get("options", script.options))
        leave.callback(own.down)
        stage = Stage(own, folder, straight, disk)
        script.play(stage, **parameters)
        assert_nothing_is_left(own, stage.trials)
