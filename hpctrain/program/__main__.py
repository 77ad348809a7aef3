"""One rank of a program: ``python -m hpctrain.program RUN_DIRECTORY``."""

from __future__ import annotations

import signal

from hpctrain.rank.stop_request import STOP_SIGNALS

# before the slow imports: a signal that arrives during start-up stays pending until `Signals` receives it
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

from hpctrain.program.workload import ProgramWorkload  # noqa: E402 - after the signals are blocked
from hpctrain.rank.entry import main  # noqa: E402 - as above

main(ProgramWorkload)
