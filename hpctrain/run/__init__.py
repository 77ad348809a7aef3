"""The run directory, which holds all files of a run, and the ledger of its attempts."""
