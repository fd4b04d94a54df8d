"""The models in Hugging Face transformers: config, cache, model classes, known to the Auto classes."""

from gsa.models.hf.cache import GSACache
from gsa.models.hf.config import GSAConfig
from gsa.models.hf.modeling import GSAForCausalLM, GSAModel

__all__ = ["GSACache", "GSAConfig", "GSAForCausalLM", "GSAModel"]
