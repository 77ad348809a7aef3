"""One HTML page about a run or a sweep, made from its directory alone."""
