"""Searches without a server: what a sweep draws, the journal of its decisions, and which run comes next."""
