"""A rank's process around the training: entry, attempt, stop signals, watchdog, exit record."""
