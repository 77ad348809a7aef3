"""What SLURM says, typed. The commands of SLURM are called here and nowhere else, each with a time limit."""
