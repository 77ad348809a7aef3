"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Limit and use of a control group, by controller: version 2 has one tree for all, version 1 one for memory."""


def available_memory_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the machine can still give, and the control groups that a job runs in allow; None where neither is told.

    proc(5), MemAvailable; cgroups(7). A group's use counts without its page cache, which makes way.

    Args:
        proc: where the kernel tells of processes.
        groups: where control groups are mounted.
    """
    known = [_of_the_machine(proc / "meminfo"), *_of_the_groups(proc / "self" / "cgroup", groups)]
    return min((count for count in known if count is not None), default=None)


def _of_the_machine(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_the_groups(membership: Path, mount: Path) -> list[int | None]:
    found = []
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers not in _FILES:
            continue
        root = mount / controllers
        group = root / path.lstrip("/")
        # a limit of any group above counts as well
        for place in [group, *group.parents]:
            if not place.is_relative_to(root):
                break
            found.append(_left_in(place, *_FILES[controllers]))
    return found


def _left_in(group: Path, limit_name: str, use_name: str) -> int | None:
    limit, use = _number(group / limit_name), _number(group / use_name)
    if limit is None or use is None:
        return None
    cache = sum(
        int(line.split()[1])
        for line in _lines(group / "memory.stat")
        if line.split()[0] in {"inactive_file", "active_file"}
    )
    return max(0, limit - max(0, use - cache))


def _number(file: Path) -> int | None:
    """None for "max", and for what isn't there."""
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
