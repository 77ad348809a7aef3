"""``conf/code``: the copy of the code with which a run is made. Owner: hpctrain.launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Code(require.Checked):
    """Copy of the code, made when the run is launched, and used by it whatever is edited meanwhile.

    docs/how_to/code.md has the details.
    """

    snapshot: Annotated[str, require.one_of("auto", "none")] = "auto"
    """auto: copy the git repository that contains the working directory, without what git ignores; outside of a
    repository, the small files of the working directory. none: copy nothing, and run what is there when the job
    starts."""
    max_mb: Annotated[float, require.at_least(0, " MB")] = 100.0
    """Largest copy, in megabytes; a larger one is refused."""
    exclude: Annotated[list[str], require.each(require.single_line)] = field(default_factory=list)
    """Patterns of files and folders that aren't copied, such as data, *.ckpt or assets/video; the copy has links to
    them."""
    include: Annotated[list[str], require.each(require.single_line)] = field(default_factory=list)
    """Patterns of files that are copied although files with such names usually hold passwords or keys, such as
    secrets.yaml."""
