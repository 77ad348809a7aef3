"""The run directory: where everything about a run lives, and the ledger of its attempts."""
