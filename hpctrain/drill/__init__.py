"""Drills: run a short training once uninterrupted and once interrupted; both must end with the same weights."""
