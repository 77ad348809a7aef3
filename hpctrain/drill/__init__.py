"""A short training, run straight and run interrupted, and the proof that both end alike."""
