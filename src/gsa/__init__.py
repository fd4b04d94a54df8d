"""Linear-time sequence models with slot memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gsa.auto_classes import register_with_transformers
from gsa.errors import BackendUnavailable, GSAError

if TYPE_CHECKING:
    from gsa.models import LM, ModelConfig, ModelState, preset, presets
    from gsa.models.hf import GSACache, GSAConfig, GSAForCausalLM, GSAModel

__version__ = "0.1.0"
__all__ = [
    "LM",
    "BackendUnavailable",
    "GSACache",
    "GSAConfig",
    "GSAError",
    "GSAForCausalLM",
    "GSAModel",
    "ModelConfig",
    "ModelState",
    "__version__",
    "preset",
    "presets",
]
# Imported when first asked for: `import gsa` itself needs neither torch nor transformers.
_LAZY = {
    **dict.fromkeys(("LM", "ModelConfig", "ModelState", "preset", "presets"), "gsa.models"),
    **dict.fromkeys(("GSACache", "GSAConfig", "GSAForCausalLM", "GSAModel"), "gsa.models.hf"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gsa' has no attribute {name!r}")


register_with_transformers()
