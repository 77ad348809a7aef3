"""A stop that is passed on to a program, by one signal to the processes that are to act on it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hpctrain.program.processes import Process

SHELL_GRACE_S = 0.5
"""Seconds in which a shell may end by itself after the programs that it ran."""
PARENT_GRACE_S = 2.0
"""Seconds in which another program may end by itself after those that it ran, or whose output it reads."""
CODE_GRACE_S = 10.0
"""The same if its exit code counts."""
ORPHAN_S = 2.0
"""Seconds after the first process in which others may end: it may have passed the signal on to them."""


@dataclass
class ForwardedStop:
    """Passes a stop on to a program.

    Its first process gets the signal, and not its whole group: DataLoader workers would die while the program saves. If
    that one doesn't handle it, it would die at once and leave its programs
    behind. So those below it that handle the signal get it first, and the others only once these have ended. A shell
    passes it on to all that it runs, and is suspended until then: it would run the next command of its script,
    although the one before was interrupted. Other programs aren't suspended: they may read what their children write.

    Args:
        root: the first process.
        number: the signal.
        orphans: returns the program's processes that have no parent among them.
        reporters: numbers of processes that report to hpctrain: they learn of the stop without the signal.
        suspend: whether to suspend shells; if not, they may run on for a moment, and exit with a code of their own.

    Attributes:
        recipients: the processes that got the signal and act on it.
    """

    root: Process
    number: signal.Signals
    orphans: Callable[[], Iterable[Process]]
    reporters: Collection[int] = ()
    suspend: bool = True
    recipients: list[Process] = field(default_factory=list, init=False)
    _shells: list[Process] = field(default_factory=list, init=False)
    _parents: list[Process] = field(default_factory=list, init=False)
    _readers: list[Process] = field(default_factory=list, init=False)
    _ended_at: float | None = field(default=None, init=False)

    def send(self) -> str:
        """Send the signal; return what was done, for the log."""
        if not self.root.alive:
            return f"the first process has ended, others get {self.number.name} if they don't end"
        self._shells, self._parents, self._readers = [], [], []
        self._ended_at = None
        self.recipients = self._find(self.root)
        names = ", ".join(f"{process.pid} ({process.command[:80]})" for process in self.recipients)
        for process in self.recipients:
            process.send(self.number)
            if process in self._shells:  # it runs no program
                self._shells.remove(process)
                process.send(signal.SIGCONT)
        self._continue_suspended()
        return f"sent {self.number.name} to {names}"

    def _continue_suspended(self) -> None:
        """Continue suspended processes (SIGSTOP): only then do they handle signals, and end."""
        for orphan in self.orphans():
            for process in (orphan, *orphan.descendants()):
                if process.state == "T" and process not in self._shells:
                    process.send(signal.SIGCONT)

    @property
    def saving(self) -> bool:
        """Whether a process that got the signal still runs."""
        return any(process.alive for process in self.recipients)

    def advance(self, now: float) -> bool:
        """Send the signal to the other processes when it is their turn; return whether a later look is needed.

        Args:
            now: seconds on a monotonic clock.
        """
        if not (self._shells or self._parents) or self.saving:
            return bool(self._shells or self._parents)
        if self._ended_at is None:
            self._ended_at = now
        if now - self._ended_at < self._grace_s:
            return True
        for process in [self.root] if self.root.alive else [*self._shells, *self._parents]:
            self._end(process)
        self._shells, self._parents = [], []
        return False

    def send_to_orphans(self, since_s: float) -> bool:
        """Send the signal to processes that outlived the first one and handle it; return whether any may save.

        Args:
            since_s: seconds since the first process ended.
        """
        handlers = [
            process for orphan in self.orphans() for process in self._handlers(orphan) if process not in self.recipients
        ]
        if since_s < ORPHAN_S:
            return bool(handlers) or self.saving
        for process in handlers:
            process.send(self.number)
        self.recipients += handlers
        return self.saving

    @property
    def _grace_s(self) -> float:
        if any(process.alive for process in (*self._parents, *self._readers)):
            return PARENT_GRACE_S if self.suspend else CODE_GRACE_S
        return 0.0 if self.suspend else SHELL_GRACE_S

    def _find(self, process: Process) -> list[Process]:
        """The processes below this one, or this one, that are to get the signal first."""
        if self._accepts(process):
            return [process]
        if process.is_shell:
            return self._find_below_shell(process)
        # one that blocks the signal waits for it in another way, and probably passes it on
        for accepts in (self._accepts_now, self._waits):
            if accepts(process):
                return [process]
            below = [target for child in process.children() if _any(child, accepts) for target in self._find(child)]
            if below:
                self._parents.append(process)
                return below
        return [process]

    def _find_below_shell(self, shell: Process) -> list[Process]:
        self._shells.append(shell)
        if self.suspend:
            shell.send(signal.SIGSTOP)
        children = shell.children()
        recipients: list[Process] = []
        for child in children:
            # `train.py | tee log`: tee ends after train.py, whose output it copies to the end
            if child.reads_from(children) and not child.handles(self.number):
                self._readers.append(child)
            else:
                recipients += self._find(child)
        return recipients or [shell]

    def _end(self, process: Process) -> None:
        """Send the signal to a process, and before it to those that it has started since."""
        if self._accepts(process):
            self.recipients.append(process)
        else:
            for child in process.children():
                self._end(child)
        process.send(self.number)
        process.send(signal.SIGCONT)

    def _handlers(self, process: Process) -> list[Process]:
        """The outermost processes, from this one downwards, that handle the signal."""
        if self._accepts(process):
            return [process]
        return [handler for child in process.children() for handler in self._handlers(child)]

    def _accepts(self, process: Process) -> bool:
        return process.pid in self.reporters or process.handles(self.number)

    def _accepts_now(self, process: Process) -> bool:
        return process.pid in self.reporters or (process.handles(self.number) and not process.blocks(self.number))

    def _waits(self, process: Process) -> bool:
        return process.blocks(self.number)


def _any(process: Process, accepts: Callable[[Process], bool]) -> bool:
    return accepts(process) or any(_any(child, accepts) for child in process.children())
