"""Start ranks from a configuration: in this process, in local processes, or as a SLURM job."""
