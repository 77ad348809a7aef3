"""Where a thread stands, seen from another one."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass

_WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/hpctrain/distributed/")
"""Parts of paths of modules whose innermost call waits for other ranks."""
_BACKWARD = "/torch/autograd/graph.py"
"""DDP waits for the others' gradients in here, below what Python sees."""


@dataclass(frozen=True, slots=True)
class Position:
    """A thread's innermost Python frame, and what led to it.

    Attributes:
        text: function, file and line.
        stack: formatted, outermost call first; empty where the thread is gone.
        waits: it is in a collective or a backward pass, where a rank waits for the others; so what keeps it there is
            probably elsewhere. A guess: on a GPU a rank waits wherever it first needs a result.
    """

    text: str
    stack: str
    waits: bool

    @classmethod
    def of(cls, thread_id: int) -> Position:
        """The position of a thread of this process, by its `threading.get_ident()`."""
        frame = sys._current_frames().get(thread_id)
        if frame is None:
            return cls("a thread that is gone", "", waits=False)
        code = frame.f_code
        path = code.co_filename.replace(os.sep, "/")
        return cls(
            text=f"{code.co_name} in {code.co_filename}:{frame.f_lineno}",
            stack="".join(traceback.format_stack(frame)),
            waits=any(part in path for part in _WAITING) or path.endswith(_BACKWARD),
        )
