"""A loop that does nothing but agree."""

from __future__ import annotations

import os
import time

import torch

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.distributed.agreement import Agreement
from hpctrain.distributed.rendezvous import meet
from hpctrain.distributed.stop_request import Stop, StopKind
from hpctrain.distributed.world import join


def be_rank(steps, interval_s, step_s, stop_at, save_at, slow=None, error_on=None):
    """Returns step, signal and save of every decision, the kind of stop of each, the last step, and some measurements.

    These are the seconds from this rank's request to its end, and how often an agreement was brought forward.

    Args:
        steps: of the loop, if nobody stops it.
        interval_s: between agreements.
        step_s: seconds that a step takes, by rank.
        stop_at: the step, by rank, from which on it wishes to stop, for a signal of number 10 + rank; 0: never.
        save_at: the step, by rank, after which it wishes to save; 0: never.
        slow: the steps after which all take so many seconds, `{step: seconds}`.
        error_on: the rank that stops for an error instead of a signal.
    """
    slow = {int(step): seconds for step, seconds in (slow or {}).items()}
    environment = ClusterEnvironment.from_environment(os.environ)
    rank, size = environment.rank, environment.world_size
    store = meet(environment, init_method="env://", token="", timeout_s=30) if size > 1 else None
    world = join(environment, store, backend="gloo", device=torch.device("cpu"), timeout_s=30)
    made, kinds, wished, save, seconds = [], [], None, False, step_s[rank]
    asked = Stop(StopKind.ERROR if rank == error_on else StopKind.SIGNAL, 10 + rank)
    with Agreement(world, interval_s) as agreement:
        for step in range(1, steps + 1):
            seconds = slow.get(step, seconds)
            time.sleep(seconds)
            stop = asked if 0 < stop_at[rank] <= step else None
            save = save or 0 < save_at[rank] == step
            wished = wished or (time.monotonic() if stop else None)
            decision = agreement.decide(step, stop=stop, save=save)
            if decision.stop or decision.save:
                made.append([step, decision.stop.signal if decision.stop else 0, decision.save])
                kinds.append(decision.stop.kind if decision.stop else 0)
                save = False
            if decision.stop:
                break
    waited = time.monotonic() - wished if wished else None
    world.barrier()
    world.close()
    return {"made": made, "kinds": kinds, "step": step, "waited_s": waited, "moved": agreement.moved}
