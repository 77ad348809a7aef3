"""What the ranks of the doctor's job measure. Imports torch: only their processes import it."""
