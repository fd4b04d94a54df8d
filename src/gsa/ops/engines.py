"""The engines by name, as attributes of this module: `engines.native` is imported when it is first asked for.

They are attributes because torch.compile looks those up while it traces, where it cannot follow an import.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

MODULES = {
    "reference": "gsa.ops.reference",
    "chunk": "gsa.ops.chunk.engine",
    "native": "gsa.ops.native.engine",
    "triton": "gsa.ops.triton.engine",
}
"""The module of an engine has a function for each operation it can do, under the name of the operation, which takes a
record of gsa.ops.calls (and `inplace`, for the step). What it does not have, it cannot do."""


def __getattr__(name: str) -> ModuleType:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = import_module(MODULES[name])
    return module
