"""What is known when the package is first imported: its version, and when Python started."""

import time

# Not the start time in /proc (proc(5)): `bash -c "a && b"` replaces itself by its last command, which then inherits the
# shell's start time. CPU time counts only Python's own work before this line; any time it spent waiting is unknown.
PYTHON_STARTED_S = time.monotonic() - time.process_time()
"""When Python started in this process: seconds on the monotonic clock."""

__version__ = "0.1.0"
