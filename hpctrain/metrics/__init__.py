"""What a run measures about itself, and where it writes that: meters, throughput, and the sinks of its metrics."""
