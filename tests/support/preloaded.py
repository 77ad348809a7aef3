"""What the fork server imports before it forks: its processes find it in memory, and start in 20 ms."""

import gc
import sys

import torch

import hpctrain.cli.resume
import hpctrain.cli.train
import hpctrain.launch.launcher
import hpctrain.launch.local
import hpctrain.train.attempt  # noqa: F401
from hpctrain.config.compose import Composer
from tests.support import fork_server  # noqa: F401 - with the function that its processes call

SEARCH_PATH = list(sys.path)
"""Of the server; a process begins with that of the tests."""

torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())  # imports torch._dynamo, for a second
Composer().compose([])
# else each child's first collections would look through all that torch has made, and copy its pages
gc.collect()
gc.freeze()
