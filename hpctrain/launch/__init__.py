"""From a configuration to running ranks: in this process, in local processes, or as a SLURM job."""
