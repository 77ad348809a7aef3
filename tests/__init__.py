"""Tests of hpctrain, and what they share; a package, since another one on the path may be called tests."""
