"""A torch dispatch mode that watches operators, and changes neither their results nor what torch.compile does."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Base of modes that see each operator as it runs; they don't see those inside of compiled code."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # with True, torch wraps the handler for its compiler, and imports the compiler for it: more than a second
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile as it would without this mode."""
        return True
