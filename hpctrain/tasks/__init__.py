"""What is trained: the base class of tasks, and the tasks that hpctrain ships."""

from hpctrain.tasks.task import Task

__all__ = ["Task"]
