"""A run as its user sees it: its state, where its time went, its log and its metrics."""
