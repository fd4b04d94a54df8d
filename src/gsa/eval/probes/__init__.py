"""Probes: small tasks and pictures that show what a model remembers, and how."""
