"""Linear-time sequence models with slot memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gsa.auto_classes import register_config, register_models
from gsa.errors import BackendUnavailable, GSAError
from gsa.extras import installed, require

if TYPE_CHECKING:
    from gsa import mixers, ops, pretrained
    from gsa.infer import Engine, State
    from gsa.infer.text_model import load
    from gsa.models import LM, ModelConfig, ModelState, preset, presets
    from gsa.models.hf.cache import GSACache
    from gsa.models.hf.config import GSAConfig
    from gsa.models.hf.modeling import GSAForCausalLM, GSAModel
    from gsa.sampling import Sampling

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
    "load",
    "mixers",
    "ops",
    "preset",
    "presets",
    "pretrained",
]
# Imported when first asked for: `import gsa` itself needs neither torch nor transformers.
_LAZY = {
    "load": "gsa.infer.text_model",
    **dict.fromkeys(("Engine", "State"), "gsa.infer"),
    "Sampling": "gsa.sampling",
    **dict.fromkeys(("LM", "ModelConfig", "ModelState", "preset", "presets"), "gsa.models"),
    "GSACache": "gsa.models.hf.cache",
    "GSAConfig": "gsa.models.hf.config",
    **dict.fromkeys(("GSAForCausalLM", "GSAModel"), "gsa.models.hf.modeling"),
}


_ROOMS = ("mixers", "ops", "pretrained")
"""Packages that are there without an import of their own: `gsa.ops.gated_slot_attention`."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"gsa.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'gsa' has no attribute {name!r}")
    if name.startswith("GSA"):
        require("transformers", f"gsa.{name}")
        register_models()
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet; without transformers, only what works without it.

    Whoever goes through all names (help, Tab completion) asks for each, and would meet an error.
    """
    if installed("transformers"):
        return __all__
    return [name for name in __all__ if name == "GSAError" or not name.startswith("GSA")]


register_config()
