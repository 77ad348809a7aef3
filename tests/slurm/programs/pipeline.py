"""A pipeline in Python: compose, submit, wait, read the metrics, load the model.

python pipeline.py RUN_DIR [PACE]: with a PACE, a file with the seconds of a step, the run is cancelled after five steps
and resumed. What was found is printed as one JSON object. The task is a module next to this file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import hpctrain

STEPS = 40


def main(run_dir: str, pace: str = "") -> None:
    config = hpctrain.compose(
        {
            "cluster": "slurm",
            "nodes": 2,
            "task": "custom",
            "task._target_": "tests.slurm.programs.scripted_task.ScriptedTask",
            "task.eval_samples": 16,
            "task.pace": pace,
            "run_dir": run_dir,
            "trainer.max_steps": STEPS,
            "trainer.global_batch_size": 8,
            "trainer.eval_every_steps": 20,
            "cluster.cpus_per_process": 1,
            "logger.tensorboard": False,
            "logger.every_steps": 20,
            "checkpoint.every_steps": 100_000,
        }
    )
    run = hpctrain.submit(config)
    found: dict[str, object] = {"submitted": run.state}
    if pace:
        while run.status().step < 5:
            time.sleep(0.5)
        found["cancelled"] = run.cancel(), run.wait(120, check=False).state
        Path(pace).write_text("0")
        run.resume()
    status = run.wait(200)
    assert "torch" not in sys.modules
    found |= {"state": status.state, "attempts": [str(one.reason) for one in status.attempts]}
    found["losses"] = [record["step"] for record in run.metrics() if "train/loss" in record]
    found["best"] = status.best is not None and status.best.name
    found["digest"] = run.checkpoints(verify=True)[-1].weights_digest
    model = run.load_model("best")
    found["model"] = sum(weights.numel() for weights in model.parameters())
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
