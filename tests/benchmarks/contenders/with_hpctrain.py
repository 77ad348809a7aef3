"""hpctrain with its defaults: metrics to a file, TensorBoard and the console, checkpoints, agreement."""

import os
import sys

from hpctrain.data.fetch import TensorBatches
from hpctrain.tasks.task import Task
from tests.benchmarks.contenders.workload import Workload

WORK = Workload()


class Work(Task):
    def build_model(self):
        return WORK.model()

    def train_dataset(self):
        return TensorBatches(*WORK.samples())

    def loss(self, model, batch):
        loss = WORK.loss(model, *batch)
        if WORK.calls == WORK.steps:
            WORK.report()  # a rank under a launcher ends without coming back to `main`
        return loss


def main() -> None:
    from hpctrain.cli import main as command

    sys.modules["with_hpctrain"] = sys.modules["__main__"]
    sys.argv[1:] = [
        "task=custom",
        "task._target_=with_hpctrain.Work",
        f"run_dir={os.environ['REPORT']}.run",
        f"trainer.global_batch_size={WORK.batch_size}",
        f"trainer.max_steps={WORK.steps}",
        "trainer.max_epochs=null",
        "optimizer.lr=1e-3",
        *os.environ.get("OVERRIDES", "").split(),
    ]
    try:
        command()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()
