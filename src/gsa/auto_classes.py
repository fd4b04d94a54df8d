"""Makes the models known to transformers' Auto classes, without importing transformers before somebody else does."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_AUTO = "transformers.models.auto"


def register_config() -> None:
    """Registers config and packaged names with those Auto classes that are imported, and with others when they are."""
    waiting = {}
    for name, register in _REGISTRATIONS.items():
        if name in sys.modules:
            _tried(register, sys.modules[name])
        else:
            waiting[name] = register
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_watcher(finder)]
    if waiting:
        sys.meta_path.insert(0, _Watcher(waiting))


def _tried(register: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Registers with a module. Of an old transformers nothing is needed by those who only import both packages."""
    try:
        register(module)
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules.get("transformers"), "__version__", "")
        warnings.warn(
            f"gsa: transformers {version} does not know gsa's models, since it lacks what they need: {error}",
            stacklevel=2,
        )


def _register_config(module: ModuleType) -> None:
    from gsa.models.hf.config import GSAConfig

    module.AutoConfig.register(GSAConfig.model_type, GSAConfig, exist_ok=True)
    _know_packaged_names(module.AutoConfig)


def _register_tokenizers(module: ModuleType) -> None:
    _know_packaged_names(module.AutoTokenizer)


def _register_packaged_models(module: ModuleType) -> None:
    for kind in (module.AutoModel, module.AutoModelForCausalLM):
        _know_packaged_names(kind)


def _register_pipeline(module: ModuleType) -> None:
    """`pipeline` asks for files itself before the Auto classes do."""
    ask = module.pipeline

    @wraps(ask)
    def pipeline(task: Any = None, model: Any = None, *args: Any, **options: Any) -> Any:
        from gsa import pretrained

        return ask(task, pretrained.path_of(model), *args, **options)

    for holder in (module, sys.modules["transformers"]):
        if "pipeline" in vars(holder):
            holder.pipeline = pipeline  # type: ignore[attr-defined]


_REGISTRATIONS: dict[str, Callable[[ModuleType], None]] = {
    f"{_AUTO}.configuration_auto": _register_config,
    f"{_AUTO}.tokenization_auto": _register_tokenizers,
    f"{_AUTO}.modeling_auto": _register_packaged_models,
    "transformers.pipelines": _register_pipeline,
}
"""What is done with each module of transformers that knows models by name."""


def _know_packaged_names(kind: Any) -> None:
    """Has `from_pretrained` of an Auto class read a packaged model of that name from where it is.

    transformers would look for it on the Hub. It has no other place to tell it of names.
    """
    ask = kind.from_pretrained.__func__

    @wraps(ask)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **options: Any) -> Any:
        from gsa import pretrained

        return ask(cls, pretrained.path_of(pretrained_model_name_or_path), *args, **options)

    kind.from_pretrained = classmethod(from_pretrained)


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
    """Waits for modules to be imported, to do something with each.

    Without the base classes of `importlib.abc`, whose import would take as long as all else of `import gsa`.
    """

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]):
        self.waiting = waiting

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            spec = None if _is_watcher(finder) else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                registering: Any = _Registering(spec.loader, self)
                spec.loader = registering
                return spec
        return None


def _is_watcher(finder: object) -> bool:
    """Whether a finder is one of ours. Where this module was imported anew, the class is another of the same name."""
    return (type(finder).__module__, type(finder).__name__) == (__name__, _Watcher.__name__)


class _Registering:
    """A module's own loader, with the registration behind it."""

    def __init__(self, loader: Any, watcher: _Watcher):
        self.loader, self.watcher = loader, watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        # Only now: an import that failed may be tried again.
        register = self.watcher.waiting.pop(module.__name__, None)
        if not self.watcher.waiting and self.watcher in sys.meta_path:
            sys.meta_path.remove(self.watcher)
        if register is not None:
            _tried(register, module)
