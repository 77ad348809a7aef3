"""The batch script's program: the attempts of one allocation."""
