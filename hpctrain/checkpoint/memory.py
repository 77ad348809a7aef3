"""The memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Files of a control group, limit and use, by controller: version 2 has one tree for all, version 1 one for memory."""


def available_memory_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the machine has left, or what the job's control groups allow if that is less; None if unknown.

    proc(5), MemAvailable; cgroups(7).

    Args:
        proc: where procfs is mounted.
        groups: where control groups are mounted.
    """
    known = [_left_on_machine(proc / "meminfo"), *_left_in_groups(proc / "self" / "cgroup", groups)]
    return min((count for count in known if count is not None), default=None)


def _left_on_machine(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups(membership: Path, mount: Path) -> list[int | None]:
    found = []
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers not in _FILES:
            continue
        root = mount / controllers
        group = root / path.lstrip("/")
        # the limits of all groups above apply as well
        for place in [group, *group.parents]:
            if not place.is_relative_to(root):
                break
            found.append(_left_in(place, *_FILES[controllers]))
    return found


def _left_in(group: Path, limit_name: str, use_name: str) -> int | None:
    limit = _number(group / limit_name)
    use = _number(group / use_name)
    if limit is None or use is None:
        return None
    # a group's page cache counts as use, but the kernel reclaims it before it refuses memory
    cache = sum(
        int(line.split()[1])
        for line in _lines(group / "memory.stat")
        if line.split()[0] in {"inactive_file", "active_file"}
    )
    return max(0, limit - max(0, use - cache))


def _number(file: Path) -> int | None:
    # the text is "max" without a limit
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
