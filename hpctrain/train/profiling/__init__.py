"""What holds a run back: measurements and the bottleneck that follows from them."""
