"""A rank of a program: the process of hpctrain's around the program that does the work."""
