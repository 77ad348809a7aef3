"""A task that another attempt overtakes while it starts: it claims the run, and logs."""

from __future__ import annotations

from hpctrain.files import write_atomic
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from tests.multiprocess.programs.trial import Trial


class Overtaken(Trial):
    """The trial; `run` is its directory, `at` the method in which it is overtaken."""

    def __init__(self, run, at, **options):
        super().__init__(**options)
        self.run, self.at = run, at

    def build_model(self):
        self._meet("build_model")
        return super().build_model()

    def eval_dataset(self):
        self._meet("eval_dataset")
        return super().eval_dataset()

    def _meet(self, here):
        if here == self.at:
            directory = RunDirectory.at(self.run)
            Ledger(directory).claim()
            (directory.checkpoints / ".tmp-step_00000005-0123abcd").mkdir()
            write_atomic(directory.metrics, b'{"step": 5, "time": 1.0, "train/loss": 0.5}\n')
