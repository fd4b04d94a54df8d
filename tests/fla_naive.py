"""flash-linear-attention's own references, which are independent of everything here."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType


@functools.cache
def naive(operation: str) -> ModuleType:
    """fla.ops.<operation>.naive, by its file: the package itself cannot be imported without Triton."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0], "ops", operation, "naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operation}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
