"""docs/results/rounded_again.py: a second error of the size that rounding to four bits made."""

from __future__ import annotations

import gguf
import numpy as np

from tests.scripts import DOCS, script

Q4_1 = gguf.GGMLQuantizationType.Q4_1


def test_the_second_error_is_as_large_as_the_first() -> None:
    page = script(DOCS / "results/rounded_again.py")
    chance = np.random.default_rng(0)
    exact = (chance.standard_normal((64, 256)) * np.geomspace(0.01, 10, 64)[:, None]).astype(np.float32)
    stored = gguf.quants.quantize(exact, Q4_1)
    once = gguf.quants.dequantize(stored, Q4_1)
    steps = page.steps(stored)
    assert steps.shape == exact.shape
    assert np.all(np.abs(once - exact) <= 0.51 * steps + 1e-6)
    again = page.rounded_again(stored, once, np.random.default_rng(1))
    assert np.all(np.abs(again - once) <= 0.5 * steps + 1e-6)
    first, second = ((x / steps).std() for x in (once - exact, again - once))
    assert 0.9 < second / first < 1.1
