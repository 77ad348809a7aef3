"""A task whose runs make the first save of checkpoint.auto as soon as the ranks agree on one."""

from hpctrain.train import checkpointing
from tests.multiprocess.programs.trial import Trial


class SavesEarly(Trial):
    """The trial task; a second save is due minutes after the first one, as usual."""

    def __init__(self, **options):
        super().__init__(**options)
        checkpointing.FIRST_AUTO_SAVE_S = 0.0
