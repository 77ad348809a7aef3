"""Sweeps: many runs from one command, as job arrays or one after another on this machine."""
