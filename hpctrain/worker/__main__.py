"""One rank of a run: ``python -m hpctrain.worker RUN_DIRECTORY``."""

from __future__ import annotations

import os
import signal
import sys

from hpctrain.rank.stop_request import STOP_SIGNALS

# before the slow imports: a signal that arrives during start-up stays pending until `StopRequest.install`
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

from hpctrain.attempt.early_end import refuse_other_version  # noqa: E402 - after the signals are blocked
from hpctrain.config.stored import load  # noqa: E402 - as above
from hpctrain.errors import ExitCode  # noqa: E402 - as above
from hpctrain.run.code import current_code  # noqa: E402 - as above
from hpctrain.run.directory import RunDirectory  # noqa: E402 - as above
from hpctrain.run.import_path import search_path  # noqa: E402 - as above
from hpctrain.run.launcher import Handover  # noqa: E402 - as above
from hpctrain.streams import ignore_write_errors, open_streams  # noqa: E402 - as above
from hpctrain.worker.entry import end_process, run_rank  # noqa: E402 - as above

open_streams()
ignore_write_errors()
run_directory = RunDirectory.existing(sys.argv[1])
# before the configuration is read, of which another version may have other keys
if refuse_other_version(run_directory, os.environ):
    end_process(ExitCode.FAILED)
digest = Handover.read(os.environ).code
if digest and (code := current_code(run_directory, digest)) is not None:
    sys.path[:] = search_path(code, sys.path, os.environ)
end_process(run_rank(load(run_directory.config), run_directory))
