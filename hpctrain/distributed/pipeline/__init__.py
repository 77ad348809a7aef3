"""Pipelines: ranks of which each has some of a model's layers."""
