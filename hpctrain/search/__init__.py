"""Sweeps and searches, without a server: what is drawn, which run is next, what is missing.

A search is a sweep with ``sweep=asha`` or ``sweep=optuna``: its array tasks ask for their runs. The runs of other
sweeps are known when the command is typed.
"""
