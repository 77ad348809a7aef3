"""A rank that is killed after so many updates of its optimizers, whatever it trains."""

import os
import signal
import warnings

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.multiprocess.programs import command

# peft uses what transformers deprecates
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(peft|transformers)\b")


def run(path, updates):
    strike_after(updates)
    return command.run("resume", path)


def rank(path, updates):
    strike_after(updates)
    return command.rank(path)


def strike_after(updates):
    left = [updates]

    def count(*_):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
