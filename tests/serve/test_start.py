"""The start of a server: nothing is imported that it does not need, and the collector leaves alone what stays."""

import gc
import subprocess
import sys

import pytest

from gsa.serve.collector import kept_for_good

HEAVY = (
    "datasets",
    "lm_eval",
    "matplotlib",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "triton",
)


def test_what_is_heavy_is_not_imported() -> None:
    code = f"import sys, gsa.cli.serve, gsa.serve.run; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_collector_leaves_alone_what_stays() -> None:
    before = gc.get_freeze_count()
    try:
        with kept_for_good():
            assert not gc.isenabled()
            kept = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert not any(thing is kept for thing in gc.get_objects())
    finally:
        gc.unfreeze()
    with pytest.raises(ZeroDivisionError), kept_for_good():
        raise ZeroDivisionError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
