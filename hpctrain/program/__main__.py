"""One rank of a program: ``python -m hpctrain.program RUN_DIRECTORY``."""

from __future__ import annotations

import os
import signal
import sys

from hpctrain.rank.stop_request import STOP_SIGNALS

# before the slow imports: a signal that arrives during start-up stays pending until `Signals` receives it
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

from hpctrain.attempt.early_end import refuse_other_version  # noqa: E402 - after the signals are blocked
from hpctrain.errors import ExitCode  # noqa: E402 - as above
from hpctrain.program.entry import run_program  # noqa: E402 - as above
from hpctrain.run.directory import RunDirectory  # noqa: E402 - as above
from hpctrain.streams import flush_output, ignore_write_errors, open_streams  # noqa: E402 - as above

open_streams()
ignore_write_errors()
run_directory = RunDirectory.existing(sys.argv[1])
# before the configuration is read, of which another version may have other keys
code = ExitCode.FAILED if refuse_other_version(run_directory, os.environ) else run_program(run_directory)
flush_output()
sys.exit(code)
