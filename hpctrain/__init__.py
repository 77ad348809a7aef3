"""hpctrain: train PyTorch models on SLURM."""

__version__ = "0.1.0"
