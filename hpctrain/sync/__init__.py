"""Runs at W&B and MLflow: what a run directory contains is sent once, by one process at a time."""
