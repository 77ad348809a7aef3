"""What runs achieved: curves, the best run of a sweep, and how two runs differ."""
