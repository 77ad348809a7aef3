"""hpctrain: train PyTorch models on SLURM."""

import time

# proc(5) has the start of the process, which is a shell's if the shell replaced itself by Python, as `bash -c "a && b"`
# does for its last command. What Python computed before this line is its own; what it waited for isn't known.
PYTHON_STARTED_S = time.monotonic() - time.process_time()
"""When Python began, by the monotonic clock."""

__version__ = "0.1.0"
