"""The end of an attempt: its cause, and whether the run is restarted, requeued or over."""
