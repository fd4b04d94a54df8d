"""The classes of this model, from the Python package gsa: `pip install gsa-lm`."""

try:
    from gsa import GSAConfig, GSAForCausalLM, GSAModel  # noqa: F401
except ImportError as error:
    raise ImportError("this model needs the Python package gsa: pip install gsa-lm") from error
