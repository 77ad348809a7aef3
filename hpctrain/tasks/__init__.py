"""Tasks: the base class, and the tasks that hpctrain ships."""

from hpctrain.tasks.task import Task

__all__ = ["Task"]
