"""How an attempt ended, and whether the run is restarted, requeued or over."""
