"""One rank of a program: ``python -m hpctrain.program RUN_DIRECTORY``."""

from __future__ import annotations

import signal
import sys

from hpctrain.distributed.stop_request import STOP_SIGNALS

# before the slow imports: a signal that arrives during start-up stays pending until `Signals` receives it
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

from hpctrain.program.entry import run_program  # noqa: E402 - after the signals are blocked
from hpctrain.run.directory import RunDirectory  # noqa: E402 - as above
from hpctrain.streams import flush_output, ignore_write_errors, open_streams  # noqa: E402 - as above

open_streams()
ignore_write_errors()
code = run_program(RunDirectory.existing(sys.argv[1]))
flush_output()
sys.exit(code)
