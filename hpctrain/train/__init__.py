"""Training on one rank: the trainer, the loop, one step, and saving and resuming."""
