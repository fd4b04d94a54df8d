"""Errors a user can cause. Each says the operation, what came and what was expected."""


class GSAError(ValueError):
    """Base of every error raised for bad input."""


class BackendUnavailable(GSAError):
    """An engine that was asked for by name cannot run here."""
