"""Measure an attempt's steps, and derive the bottleneck from the measurements."""
