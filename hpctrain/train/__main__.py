"""One rank of a training: ``python -m hpctrain.train RUN_DIRECTORY``."""

from __future__ import annotations

import signal

from hpctrain.rank.stop_request import STOP_SIGNALS

# before the slow imports: a signal that arrives during start-up stays pending until `StopRequest.install`
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

from hpctrain.rank.entry import main  # noqa: E402 - after the signals are blocked
from hpctrain.train.workload import TrainingWorkload  # noqa: E402 - as above

main(TrainingWorkload.launched)
