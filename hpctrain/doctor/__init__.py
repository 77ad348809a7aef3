"""Checks before the first run on a cluster: this machine, SLURM's settings, and the nodes through a job."""
