"""What TensorBoard shows of a run."""

from __future__ import annotations


def points(directory):
    """By tag, the steps and a digest of each value; the time of a session isn't one."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.tensor_proto.SerializeToString()) for event in accumulator.Tensors(tag)]
        for tag in accumulator.Tags()["tensors"]
        if not tag.startswith(("throughput/", "memory/", "_hparams_/"))
    }
