"""What a run measures about itself, and where it writes that: meters, memory, and the sinks of its metrics."""
