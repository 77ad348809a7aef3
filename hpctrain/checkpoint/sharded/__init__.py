"""Checkpoints of which each rank of a mesh writes a part."""
