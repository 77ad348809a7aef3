"""The command lines of container engines, which start the ranks in an image."""
