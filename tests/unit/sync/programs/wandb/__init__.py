"""In place of W&B's client: one that hangs, or one that refuses."""

import os
import time


class Settings:
    def __init__(self, **_):
        pass


def init(**_):
    if os.environ["STUB"] == "hangs":
        time.sleep(300)
    raise PermissionError("the key is\n\x1b[31mnot known")
