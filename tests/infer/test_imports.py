"""The modules of the room import each other in one direction only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import gsa.infer


def imported(path: Path) -> set[str]:
    """The modules of gsa.infer that a file imports anywhere: in functions and for type checkers, too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
    return {name.removeprefix("gsa.infer.") for name in names if name.startswith("gsa.infer.")}


def test_no_module_imports_one_that_imports_it() -> None:
    modules = {path.stem: imported(path) for path in Path(gsa.infer.__path__[0]).glob("*.py")}
    order = list(TopologicalSorter(modules).static_order())  # raises CycleError, which names the modules
    assert order.index("model") < order.index("runner") < order.index("engine")
