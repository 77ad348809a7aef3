"""Checkpoints: complete or absent, verified when read, exact to the bit."""
