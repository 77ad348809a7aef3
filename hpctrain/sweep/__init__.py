"""Many runs from one command: one job array per kind of resources, or one run after another on this machine."""
