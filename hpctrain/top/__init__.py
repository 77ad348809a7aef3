"""Many runs, live, in a terminal."""
