"""``conf/notify``: a command that learns of the run's starts, interruptions and end. Owner: hpctrain.attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hpctrain.config import require

EVENTS = ("started", "interrupted", "completed", "failed", "cancelled")
"""The changes of a run's state for which a command can be started."""
PLAIN = require.that(
    # config.yaml is read by OmegaConf, which would look for a key of that name
    lambda command: "${" not in command and "\0" not in command,
    "contains ${ or a NUL character",
    "write $NAME without braces, or put the commands into a script",
    quoted=True,
)


@dataclass(kw_only=True, slots=True)
class Notify(require.Checked):
    """A command of your own, which is started when the state of the run changes, with a JSON object on its input.

    docs/how_to/notify.md has examples and the fields of the object. The command can't fail the run, and can't delay it
    by more than `timeout_s`.
    """

    command: Annotated[str | None, require.not_empty, PLAIN] = None
    """Command for `sh -c`; null: none. It is stored in config.yaml, so have it read a secret, such as the address of a
    webhook, from a file."""
    timeout_s: Annotated[float, require.between(1, 600)] = 30.0
    """Seconds until a command is killed, with its child processes."""
    on: Annotated[list[str], require.each(require.one_of(*EVENTS))] = field(default_factory=lambda: list(EVENTS))
    """Events for which to start the command: `started`, `interrupted`, `completed`, `failed`, `cancelled`."""
