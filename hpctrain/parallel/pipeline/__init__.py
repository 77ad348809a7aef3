"""Pipelines: the layers of a model are divided among ranks, which send activations to each other.

Not torch's `PipelineStage` (2.13): it unpickles what other ranks send, keeps a buffer for each micro-batch of a step,
refuses batches of another shape, and reduces the gradients of FSDP2 once per step only, in whole. The task's own code
runs in each stage: methods for the first stage's inputs and the last one's loss would be needed in every task, and
torch.export can't trace many models.
"""
