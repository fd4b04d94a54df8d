"""Linear-time sequence models with slot memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gsa.auto_classes import register_config, register_models
from gsa.errors import BackendUnavailable, GSAError
from gsa.extras import require

if TYPE_CHECKING:
    from gsa.infer import Engine, Sampling, State
    from gsa.models import LM, ModelConfig, ModelState, preset, presets
    from gsa.models.hf.cache import GSACache
    from gsa.models.hf.config import GSAConfig
    from gsa.models.hf.modeling import GSAForCausalLM, GSAModel

__version__ = "0.1.0"
__all__ = [
    "LM",
    "BackendUnavailable",
    "Engine",
    "GSACache",
    "GSAConfig",
    "GSAError",
    "GSAForCausalLM",
    "GSAModel",
    "ModelConfig",
    "ModelState",
    "Sampling",
    "State",
    "__version__",
    "preset",
    "presets",
]
# Imported when first asked for: `import gsa` itself needs neither torch nor transformers.
_LAZY = {
    **dict.fromkeys(("Engine", "Sampling", "State"), "gsa.infer"),
    **dict.fromkeys(("LM", "ModelConfig", "ModelState", "preset", "presets"), "gsa.models"),
    "GSACache": "gsa.models.hf.cache",
    "GSAConfig": "gsa.models.hf.config",
    **dict.fromkeys(("GSAForCausalLM", "GSAModel"), "gsa.models.hf.modeling"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gsa' has no attribute {name!r}")
    if name.startswith("GSA"):
        require("transformers", f"gsa.{name}")
        register_models()
    return getattr(import_module(_LAZY[name]), name)


register_config()
