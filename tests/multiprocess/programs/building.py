"""Ranks of a mesh that leave initial values to a checkpoint, and then find none."""

from __future__ import annotations

from pathlib import Path

import torch
from sharded_saves import meet_others

from hpctrain.config.stored import load
from hpctrain.distributed.local_part import local_part
from hpctrain.run.directory import RunDirectory
from hpctrain.train.parts import Parts


def without_checkpoint(path, degrees):
    """Return the names of what differs from an ordinary start."""
    world, _ = meet_others(**degrees)
    config = load(RunDirectory.at(Path(path)).config)
    torch.use_deterministic_algorithms(True)  # memory that nothing has written to contains NaN
    straight, after = Parts(config, world), torch.get_rng_state()
    parts = Parts(config, world, resumes=True)
    found = [] if torch.equal(after, torch.get_rng_state()) else ["the random state"]
    left_out = [name for name, value in parts.module.named_parameters() if local_part(value).isnan().any()]
    parts.settle_values(restored=False)
    for kind, one, other in (
        ("weights", straight.module.state_dict(), parts.module.state_dict()),
        ("average", straight.ema.state(), parts.ema.state()),
    ):
        found += [f"{kind}: {name}" for name in one if not torch.equal(local_part(one[name]), local_part(other[name]))]
    world.close()
    return {"differs": found, "left out": left_out}
