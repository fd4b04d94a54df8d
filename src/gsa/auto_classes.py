"""Makes the models known to transformers' Auto classes, without importing transformers before somebody else does."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CONFIGS, _MODELS = "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"


def register_with_transformers() -> None:
    """Registers at once what is imported already, and the rest when it is imported."""
    for name in (_CONFIGS, _MODELS):
        if name in sys.modules:
            _register(name)
        else:
            sys.meta_path.insert(0, _Watcher(name))


def _register(name: str) -> None:
    from transformers import AutoConfig

    from gsa.models.hf.config import GSAConfig

    if name == _CONFIGS:
        AutoConfig.register(GSAConfig.model_type, GSAConfig, exist_ok=True)
        return
    from transformers import AutoModel, AutoModelForCausalLM

    from gsa.models.hf.modeling import GSAForCausalLM, GSAModel

    AutoModel.register(GSAConfig, GSAModel, exist_ok=True)
    AutoModelForCausalLM.register(GSAConfig, GSAForCausalLM, exist_ok=True)


class _Watcher(MetaPathFinder):
    """Waits for one module to be imported."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Registering(spec.loader, name)
                return spec
        return None


class _Registering(Loader):
    """A module's own loader, with the registration behind it."""

    def __init__(self, loader: Any, name: str):
        self.loader, self.name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register(self.name)
