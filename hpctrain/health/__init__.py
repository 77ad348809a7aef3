"""Checks during training: the watchdog."""
