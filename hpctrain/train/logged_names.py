"""The names under which a training logs, and who logs them: a mean over two sources would be neither's."""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.errors import TaskError

REMEDY = "choose another name for one of them"


class LoggedNames:
    """What was logged so far in this attempt.

    Attributes:
        of_callbacks: by logged name, such as `train/acc`, the callback that logs a scalar: `callbacks.NAME`.
    """

    def __init__(self) -> None:
        self.of_callbacks: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._methods: dict[str, str] = {}

    def require_one_method(self, method: str, names: Iterable[str]) -> None:
        """Refuse names that another loss logs, too.

        Args:
            method: the task's class and the method that computed a loss.
            names: of the values that it returned or logged.

        Raises:
            TaskError: another method has logged or returned one of them.
        """
        for name in names:
            other = self._methods.setdefault(name, method)
            if other != method:
                raise TaskError(f"{method} logs {name!r}, as {other} does: {REMEDY}")

    def require_one_source(self, source: str, name: str, *, is_callback: bool) -> None:
        """Refuse the name of a scalar that a callback logs, too.

        Args:
            source: what logs it now: the task's class, or `callbacks.NAME`.
            name: as it is logged.
            is_callback: whether the source is one; then the name is its own from now on.

        Raises:
            TaskError: another callback has logged it.
        """
        other = self.of_callbacks.get(name, source)
        if other != source:
            raise TaskError(f"{source} logs {name!r}, as {other} does: {REMEDY}")
        if is_callback:
            self.of_callbacks[name] = source

    def require_one_kind(self, source: str, name: str, kind: str) -> None:
        """Refuse a name under which another kind of thing is logged, too: sinks have one kind under a name.

        Args:
            source: what logs it now.
            name: as it is logged.
            kind: `value`, or that of a medium.

        Raises:
            TaskError: it was logged as another kind before.
        """
        found = self._kinds.setdefault(name, kind)
        if found != kind:
            raise TaskError(f"{source} logs {name!r} as {found} and as {kind}: {REMEDY}")

    def require_no_medium(self, source: str, names: Iterable[str]) -> None:
        """Refuse names of values that are those of media, too.

        Raises:
            TaskError: a medium was logged under one of them.
        """
        for name in names:
            if name in self._kinds:
                self.require_one_kind(source, name, "value")
