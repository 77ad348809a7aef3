"""A loop that does nothing but agree."""

from __future__ import annotations

import time

from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import Stop, StopKind, StopRequest
from tests.multiprocess.programs.gloo_world import joined


class Request(StopRequest):
    """A request whose stop is given, in place of a signal that arrives."""

    given = None

    @property
    def pending(self):
        return self.given


def be_rank(steps, interval_s, step_s, stop_at, save_at, slow=None, error_on=None):
    """Loop with the other ranks, and return what they decided.

    Args:
        steps: of the loop, if nothing stops it.
        interval_s: most seconds between agreements.
        step_s: seconds that a step takes, by rank.
        stop_at: the step, by rank, from which on it is asked to stop by a signal of number 10 + rank; 0: never; -1:
            from before the first step on.
        save_at: the step, by rank, after which its save is due; 0: never.
        slow: the steps from which on all take so many seconds, `{step: seconds}`.
        error_on: the rank that stops for an error instead of a signal.

    Returns:
        Step, signal and save of every decision, the kind of stop of each, the last step, the seconds from this rank's
        request to its end, and the signal that the start knew of.
    """
    slow = {int(step): seconds for step, seconds in (slow or {}).items()}
    world = joined()
    rank = world.rank
    made, kinds, asked_at, save, seconds, request = [], [], None, False, step_s[rank], Request()
    asked = Stop(StopKind.ERROR if rank == error_on else StopKind.SIGNAL, 10 + rank)
    request.given = asked if stop_at[rank] < 0 else None
    agreement = Agreement(world, request, interval_s)
    start = agreement.agree_and_calibrate()
    for step in range(1, steps + 1):
        seconds = slow.get(step, seconds)
        time.sleep(seconds)
        if 0 < stop_at[rank] <= step:
            request.given, asked_at = asked, asked_at or time.monotonic()
        save = save or 0 < save_at[rank] == step
        decision = agreement.decide(step, save=save)
        if decision.stop or decision.save:
            made.append([step, decision.stop.signal if decision.stop else 0, decision.save])
            kinds.append(decision.stop.kind if decision.stop else 0)
            save = False
        if decision.stop:
            break
    waited_s = time.monotonic() - asked_at if asked_at else None
    world.barrier()
    world.close()
    return {"made": made, "kinds": kinds, "step": step, "waited_s": waited_s, "start": start and start.signal}
