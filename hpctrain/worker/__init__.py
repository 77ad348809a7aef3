"""The life of a rank's process, around the training."""
