"""What programs and notebooks call; `import hpctrain` has its names."""
