"""Results of runs: curves, the best run of a sweep, and the differences of two runs."""
