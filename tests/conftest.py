"""What every test begins with, and which ones are left out unless they are asked for."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.fork_server import ForkServer

# how long one example takes, or is made, says nothing on a loaded machine
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("hpctrain", untimed)
settings.register_profile("gate", untimed, derandomize=True, max_examples=25)
settings.register_profile("nightly", untimed, max_examples=300)
settings.load_profile("hpctrain")
ONLY_WHEN_NAMED = ("soak", "nightly")
COMPUTING = ("multiprocess", "contracts")
"""Folders with files that take long and wait little."""
TESTS = Path(__file__).parent

# Ranks that tests start by hand keep their user's secret here, and not in the home of whoever runs the tests.
if "XDG_CONFIG_HOME" not in os.environ:
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="hpctrain-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

# A developer's own defaults for sbatch would be used by every test of cluster=slurm.
for name in [name for name in os.environ if name.startswith("SBATCH_")]:
    del os.environ[name]

# A shell starts background jobs with SIGINT ignored, and the commands that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Keras imports it. Its handler closes the stream that it found as sys.stderr once Hydra sets up logging, unless that is
# the process's own: pytest's capture would be gone.
with contextlib.redirect_stderr(sys.__stderr__):
    importlib.import_module("absl.logging")


@pytest.fixture(autouse=True)
def untouched_logging():
    """A test that looks at the log begins without what a rank (its handlers), or Hydra's `--cfg`, left in this process.

    Hydra sets up a logging of its own before it shows anything, and disables every logger that was there.
    """
    logging.root.setLevel(logging.WARNING)
    for name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "hpctrain"]:
        logging.getLogger(name).disabled = False
    logger = logging.getLogger("hpctrain")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def without_older_objects() -> None:
    """Keep what is left of earlier files out of garbage collections: in a long process they take a fifth of the time.

    A test that looks through all objects, as `build_without_values` does, then finds its own.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Restore SIGHUP's default action: under `nohup bash tests/run` it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts ranks outside of SLURM: one server for the programs of all folders, since each imports torch."""
    from tests.support.fork_server import ForkServer, clean_environment

    server = ForkServer(tmp_path_factory.mktemp("fork_server"), clean_environment())
    yield server
    server.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # an earlier test may have run a program in this process that sets its umask; the sandbox needs the usual one
    os.umask(0o022)


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and skip what is marked `soak` or `nightly`, unless -m names the marker."""
    items[:] = in_turn(items)
    for item in items:
        if folder_of(item) != "slurm":
            # with --dist=loadgroup: their fixtures are made once per file
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
        for name in ONLY_WHEN_NAMED:
            if item.get_closest_marker(name) and name not in config.getoption("markexpr"):
                item.add_marker(pytest.mark.skip(f"pytest -m {name} runs it"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Keep the modules and the thousands of tests out of garbage collections, now and later: nothing frees them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests on SLURM, which mostly wait, in turn with files that compute; the short tests come last.

    So both processors are busy from the start, and no worker begins a long test when the others end.
    """
    waiting = [[item] for item in items if folder_of(item) == "slurm"]
    computing = groupby((item for item in items if folder_of(item) in COMPUTING), lambda item: item.path)
    short = [item for item in items if folder_of(item) not in ("slurm", *COMPUTING)]
    placed = [
        (number / len(units), tests)
        for units in (waiting, [list(tests) for _, tests in computing])
        for number, tests in enumerate(units)
    ]
    return [test for _, tests in sorted(placed, key=lambda pair: pair[0]) for test in tests] + short


def folder_of(item: pytest.Item) -> str:
    """The folder of tests/ that a test is in."""
    return item.path.relative_to(TESTS).parts[0]
