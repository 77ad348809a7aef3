"""A program without torch: a walk of random steps, with a session, and the way to resume it: `saved_by_numpy.py STEPS`.

With 0 STEPS it walks until it is stopped. In a run directory `interrupted`, its first attempt waits for the stop.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from hpctrain import session

steps = int(sys.argv[1])
waits = session.run_dir().name == "interrupted" and session.attempt() == 1
rank = int(os.environ["RANK"])
generator = np.random.default_rng(rank)
position = np.zeros(3)
step = 0
session.start(total_steps=steps or None)
if save := session.last_save():
    with np.load(save.path) as state:
        position = state["position"]
        generator.bit_generator.state = json.loads(str(state["generator"]))
    step = save.step
while step < steps or not steps:
    position = position + generator.normal(size=3)
    step += 1
    session.step(step, {"train/distance": float(np.linalg.norm(position))})
    while not (stop := session.should_stop()) and waits and step == steps // 2:
        time.sleep(0.01)
    if stop or step == steps:
        path = session.checkpoint_dir() / f"step_{step}.npz"
        np.savez(path, position=position, generator=json.dumps(generator.bit_generator.state))
        session.saved(step, path)
    if stop:
        sys.exit()
    time.sleep(0.01)
session.done()
