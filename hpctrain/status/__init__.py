"""What a user sees of a run: its state, where its time went, its log and its metrics."""
