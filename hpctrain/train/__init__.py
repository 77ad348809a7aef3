"""The rank's entry, the trainer, the loop and one step."""
