"""The supervisor of a run's attempts in this allocation: ``python -m hpctrain.supervise RUN_DIRECTORY``."""

from __future__ import annotations

import os
import sys

from hpctrain.run.directory import RunDirectory
from hpctrain.supervise.batch_script import supervise

sys.exit(supervise(RunDirectory.existing(sys.argv[1]), os.environ))
