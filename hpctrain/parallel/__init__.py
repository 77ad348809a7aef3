"""Ranks that share a model, and ranks that each have a replica of it."""
