"""The program that a batch script runs: it starts the attempts of one allocation and requeues the job."""
