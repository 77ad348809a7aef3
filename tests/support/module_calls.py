"""Run hpctrain with these arguments, and write how often each of its modules was entered.

    python tests/support/module_calls.py FILE cluster=slurm nodes=4 cluster.dry_run=true

FILE gets a JSON object for the main thread, and one for all other threads of this process, whose calls depend on the
clock. Counted are calls of functions, on every version of Python alike: comprehensions, which
are functions up to Python 3.11, aren't counted, and neither are the bodies of modules and classes.
"""

from __future__ import annotations

import atexit
import inspect
import json
import runpy
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[2] / "hpctrain")


class ModuleCalls:
    """Calls per module of the package; a profile function."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._modules: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (module := self._module(frame)):
            self.counts[module] += 1

    def _module(self, frame: FrameType) -> str:
        code = frame.f_code
        if code not in self._modules:
            inside = code.co_filename.startswith(PACKAGE) and _is_function(frame)
            self._modules[code] = code.co_filename.removeprefix(PACKAGE).lstrip("/") if inside else ""
        return self._modules[code]


def _is_function(frame: FrameType) -> bool:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):
        return False
    in_a_body = frame.f_back is not None and not frame.f_back.f_code.co_flags & inspect.CO_OPTIMIZED
    return not (code.co_name == "<genexpr>" and in_a_body)


if __name__ == "__main__":
    _, file, *arguments = sys.argv
    calls = ModuleCalls()
    calls_of_threads = ModuleCalls()

    @atexit.register
    def write() -> None:
        """Stop counting, and write the file."""
        sys.setprofile(None)
        Path(file).write_text(json.dumps([calls.counts, calls_of_threads.counts]))

    sys.argv = ["hpctrain", *arguments]
    threading.setprofile(calls_of_threads)
    sys.setprofile(calls)
    runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
