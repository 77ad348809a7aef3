"""Pipelines: the layers of a model are divided among ranks, which send activations to each other."""
