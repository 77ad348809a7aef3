"""The metrics of a run: meters, memory use, and the sinks to which metrics are written."""
