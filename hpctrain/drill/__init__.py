"""Drills: a short training runs once straight and once interrupted, and both must end with the same weights."""
