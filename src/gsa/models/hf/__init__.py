"""The models in Hugging Face transformers: config, cache, model classes."""

from gsa.extras import require

require("transformers", "gsa.models.hf, the classes for Hugging Face,")
