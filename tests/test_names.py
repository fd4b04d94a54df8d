"""What `import gsa` offers, and what it costs."""

import subprocess
import sys

import pytest

import gsa


def test_all_public_names_are_listed_and_there() -> None:
    assert dir(gsa) == sorted(gsa.__all__)
    assert {"load", "LM", "Engine", "Sampling", "State", "GSAForCausalLM"} <= set(dir(gsa))
    for name in gsa.__all__:
        assert getattr(gsa, name) is not None, name
    with pytest.raises(AttributeError, match="module 'gsa' has no attribute 'laod'"):
        _ = gsa.laod


def test_names_are_listed_and_defaults_known_without_torch() -> None:
    code = (
        "import sys, gsa; dir(gsa); gsa.Sampling; import gsa.cli.generate, gsa.cli.chat; "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]); "
        "print(gsa.LM.__name__, 'gsa.train' in sys.modules); "  # rooms import from those above them
        "print(gsa.ops.gated_slot_attention.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "LM", "False", "gated_slot_attention"]
