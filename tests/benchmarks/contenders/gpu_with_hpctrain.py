"""hpctrain with its defaults on one GPU: metrics, measurements, checkpoints in the background."""

import os
import sys

from hpctrain.data.fetch import TensorBatches
from hpctrain.tasks.task import Task
from hpctrain.train.checkpointing import Checkpointing
from tests.benchmarks.contenders.gpu_workload import GpuWorkload

WORK = GpuWorkload()


class Work(Task):
    def build_model(self):
        return WORK.model()

    def train_dataset(self):
        return TensorBatches(*WORK.samples())

    def loss(self, model, batch):
        return WORK.loss(model, *batch)


def time_saves() -> None:
    """Time each save in the background, and wait for its write outside of the readings."""
    original = Checkpointing.save

    def save(self, step, **options):
        if options["wait"]:
            original(self, step, **options)
            return
        WORK.save(lambda: original(self, step, **options))
        self._saver.finish()

    Checkpointing.save = save


def words() -> list[str]:
    kind = WORK.kind
    options = [f"optimizer.{name}={value}" for name, value in kind.options.items()]
    return [
        "task=custom",
        "task._target_=gpu_with_hpctrain.Work",
        f"run_dir={os.environ['REPORT']}.run",
        "code.snapshot=none",
        "precision=bf16",
        f"optimizer={kind.optimizer.lower()}",
        "optimizer.fused=true",
        *options,
        f"trainer.compile={str(WORK.compiled).lower()}",
        f"trainer.channels_last={str(kind.channels_last).lower()}",
        f"trainer.global_batch_size={kind.batch_size}",
        f"trainer.max_steps={WORK.steps}",
        "trainer.max_epochs=null",
        f"checkpoint.every_steps={WORK.block if WORK.saves else 'null'}",
        "checkpoint.every_min=null",
        f"cluster.gpus_per_node={1 if WORK.device.type == 'cuda' else 0}",
        *os.environ.get("OVERRIDES", "").split(),
    ]


def main() -> None:
    from hpctrain.cli import main as command

    sys.modules["gpu_with_hpctrain"] = sys.modules["__main__"]
    time_saves()
    sys.argv[1:] = words()
    try:
        command()
    except SystemExit as end:
        if end.code:
            raise
    WORK.report()


if __name__ == "__main__":
    main()
