"""A typed client for SLURM. Only this package runs SLURM's commands, each with a time limit."""
