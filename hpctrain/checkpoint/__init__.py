"""Checkpoints: complete or absent, verified when they are read, exact to the bit."""
