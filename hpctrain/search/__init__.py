"""Searches without a server: what a sweep draws, the journal of its decisions, and which run comes next.

A search is a sweep with ``sweep=asha`` or ``sweep=optuna``: its array tasks ask for their runs. The runs of other
sweeps are known when the command is typed.
"""
