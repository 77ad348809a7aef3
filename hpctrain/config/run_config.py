"""The keys of every run, whether it is a training or a program."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from hpctrain.config import require
from hpctrain.config.cluster import MAX_NODES, Cluster
from hpctrain.config.code import Code
from hpctrain.config.health import Health
from hpctrain.config.notify import Notify
from hpctrain.config.resume import Resume

FOLDER_NAME = require.that(
    # at most 200: a file system takes 255 bytes, and a job's files add to the name
    lambda name: re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", name),
    "is not usable as a folder name",
    "use up to 200 letters, digits and any of _ . + -",
    quoted=True,
)
NOT_EMPTY = require.that(str.strip, "is empty", "name a folder, or omit the key", quoted=True)
A_RUN = require.that(str.strip, "contains an empty name", "name runs: after=RUN,RUN; after=[] for none", quoted=True)
OWNER_MAY_ALL = require.that(
    lambda mode: re.fullmatch(r"0?2?7[0-7][0145]", mode),
    "must be octal, give the owner all permissions, and not let every user of the machine write",
    "set {key}='0750'",
)


@dataclass(kw_only=True, slots=True)
class RunConfig(require.Checked):
    """What launching, supervising and showing a run depends on."""

    prefix = ""

    nodes: Annotated[int, require.at_least(1, at_most=MAX_NODES)] = 1
    """Number of machines."""
    name: Annotated[str | None, FOLDER_NAME] = None
    """Name of the run, in the queue and under runs/; null: the task's name, or the program's."""
    run_dir: Annotated[str | None, require.single_line, NOT_EMPTY] = None
    """Run directory, which contains everything about the run; null: runs/NAME/DATE_TIME."""
    # a text: as a number, YAML 1.1 would read 0750 as 488
    run_mode: Annotated[str, OWNER_MAY_ALL] = "0750"
    """Octal permissions of the run directory, of a sweep's directory, and of everything that a run creates in them,
    whatever the umask; 2770 lets a group share runs."""
    after: Annotated[list[str], require.each(require.single_line), require.each(A_RUN)] = field(default_factory=list)
    """Start when these runs have completed: their directories, their names under runs/, or a sweep for all of its runs;
    after=RUN,RUN needs no brackets, also in a sweep, where every run waits for all of them."""
    after_failure: Annotated[str, require.one_of("end", "start", "wait")] = "end"
    """When one of those runs has failed, was cancelled or has stopped: end this run too, start it all the same, or wait
    until that run has been resumed and has completed."""
    cluster: Cluster = field(default_factory=Cluster)
    """Where the ranks run."""
    code: Code = field(default_factory=Code)
    """The copy of the code with which the run is made."""
    health: Health = field(default_factory=Health)
    """When a run without progress counts as hanging."""
    notify: Notify = field(default_factory=Notify)
    """What is started when the state of the run changes."""
    resume: Resume = field(default_factory=Resume)
    """What may change when a run is resumed."""

    @property
    def mode(self) -> int:
        """Permissions of the run directory."""
        return int(self.run_mode, 8)
