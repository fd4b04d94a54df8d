"""Makes the models known to transformers' Auto classes, without importing transformers before somebody else does."""

from __future__ import annotations

import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_AUTO = "transformers.models.auto.configuration_auto"


def register_config() -> None:
    """Registers the config at once if transformers' Auto classes are imported already, else when they are."""
    if _AUTO in sys.modules:
        _register_config()
    else:
        sys.meta_path.insert(0, _Watcher())


def _register_config() -> None:
    from transformers import AutoConfig

    from gsa.models.hf.config import GSAConfig

    AutoConfig.register(GSAConfig.model_type, GSAConfig, exist_ok=True)


@cache
def register_models() -> None:
    """Registers the models; a config calls this, by which Auto classes look models up."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from gsa.models.hf.config import GSAConfig
    from gsa.models.hf.modeling import GSAForCausalLM, GSAModel

    AutoModel.register(GSAConfig, GSAModel, exist_ok=True)
    AutoModelForCausalLM.register(GSAConfig, GSAForCausalLM, exist_ok=True)
    # By these names the Trainer knows whose labels to shift when it computes a loss itself.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[GSAConfig.model_type] = GSAForCausalLM.__name__


class _Watcher:
    """Waits for the Auto classes of configs to be imported.

    Without the base classes of `importlib.abc`, whose import would take as long as all else of `import gsa`.
    """

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _AUTO:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                registering: Any = _Registering(spec.loader, self)
                spec.loader = registering
                return spec
        return None


class _Registering:
    """A module's own loader, with the registration behind it."""

    def __init__(self, loader: Any, watcher: _Watcher):
        self.loader, self.watcher = loader, watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self.watcher in sys.meta_path:
            sys.meta_path.remove(self.watcher)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register_config()
