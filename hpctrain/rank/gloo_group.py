"""Groups for messages on the CPU."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

CONTROL = "control"
"""The name of the group for messages of the training thread, in torch's flight recorder."""
SAVING = "saving"
"""The name of the group for messages of the threads that write checkpoints."""


def gloo_group(store: Store, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Make a group of all ranks for messages on the CPU; collective.

    Args:
        store: of the ranks.
        timeout: bound on each collective.
        name: of the group, in torch's flight recorder.
    """
    # new_group has no argument for a store, and takes that of the default group: NCCL's, which isn't sealed
    groups = dist.distributed_c10d._world.pg_map
    default = dist.group.WORLD
    assert default is not None
    before = groups[default]
    groups[default] = before[0], PrefixStore(name, store)
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
    finally:
        groups[default] = before
    return group
