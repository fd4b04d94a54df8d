"""Folders that transformers loads where nobody has imported gsa: with a module in them that imports it.

transformers has no plugins; it finds models of others only by `auto_map` in config.json, which names classes of a
module beside it, and only with `trust_remote_code=True`.
"""

from __future__ import annotations

from pathlib import Path

from gsa.extras import DISTRIBUTION, how_to_install

MODULE = "modeling_gsa.py"
AUTO_MAP = {
    "AutoConfig": "modeling_gsa.GSAConfig",
    "AutoModel": "modeling_gsa.GSAModel",
    "AutoModelForCausalLM": "modeling_gsa.GSAForCausalLM",
}
# Without `try`, transformers itself would say which package is missing, and name a stranger's.
TEXT = f'''\
"""The classes of this model, from the Python package gsa, whose distribution is {DISTRIBUTION}."""

try:
    from gsa import GSAConfig, GSAForCausalLM, GSAModel  # noqa: F401
except ImportError as error:
    raise ImportError(
        "this model needs the Python package gsa: {how_to_install("hf")}"
    ) from error
'''


def write_module(folder: str | Path) -> None:
    """Writes the module that `AUTO_MAP` is about."""
    (Path(folder) / MODULE).write_text(TEXT, encoding="utf-8")
