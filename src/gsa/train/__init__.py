"""Training: one readable loop, and what surrounds it."""
