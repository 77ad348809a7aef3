"""What a user is shown of a run: its state, its accounting, its log and metrics."""
