"""Tasks: the base class, metrics over held-out samples, and the tasks that hpctrain ships."""

from hpctrain.tasks.metric import Metric, PerSample
from hpctrain.tasks.task import Sums, Task, classification_sums

__all__ = ["Metric", "PerSample", "Sums", "Task", "classification_sums"]
