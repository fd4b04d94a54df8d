"""Language models with any mixer."""

from gsa.models.catalogue import preset, presets
from gsa.models.config import ModelConfig
from gsa.models.lm import LM, LMOutput
from gsa.models.state import ModelState

__all__ = ["LM", "LMOutput", "ModelConfig", "ModelState", "preset", "presets"]
