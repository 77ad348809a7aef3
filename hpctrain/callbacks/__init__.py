"""Callbacks, which watch a training: the base class, and the ones that come with hpctrain."""

from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.training import Training

__all__ = ["Callback", "Training"]
