"""Linear-time sequence models with slot memory."""

from gsa.errors import BackendUnavailable, GSAError

__version__ = "0.1.0"
__all__ = ["BackendUnavailable", "GSAError", "__version__"]
