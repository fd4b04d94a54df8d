"""The classes of this model, from the Python package gsa, whose distribution is gsa-lm."""

try:
    from gsa import GSAConfig, GSAForCausalLM, GSAModel  # noqa: F401
except ImportError as error:
    raise ImportError(
        "this model needs the Python package gsa: pip install 'gsa-lm[hf]', or in a checkout pip install -e '.[hf]'"
    ) from error
