"""A model in four bits, rounded once more: what do four bits cost?

    python docs/results/rounded_again.py MODEL.Q4_1.gguf OUT --seed 0
    gsa eval OUT --tasks piqa,arc_easy --data DATA

The weights that a GGUF file was rounded from are not always to be had. What rounding has cost can be told without them:
to every weight that is stored in four bits (Q4_1) an error is added as large as rounding made one, drawn evenly from
half a step below to half a step above. Such errors are small and independent, so what the second costs is about what
the first has cost. OUT is the same model with these weights, as softmax attention, as `gsa convert --to attention`
writes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from gsa.convert.run import convert
from gsa.convert.students import Choices

BLOCK, BYTES = 32, 20
"""Weights of a block of Q4_1, and its bytes: step and minimum in fp16, then four bits for each weight."""


def steps(data: np.ndarray) -> np.ndarray:
    """The step of every weight [rows, columns] of a tensor in Q4_1, which is stored as bytes [rows, ...]."""
    blocks = np.ascontiguousarray(data).reshape(-1, BYTES)
    step = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return np.repeat(step, BLOCK, axis=1).reshape(data.shape[0], -1)


def rounded_again(data: np.ndarray, weights: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Weights of a tensor in Q4_1 with a second error of the size of the first."""
    error = chance.uniform(-0.5, 0.5, weights.shape).astype(np.float32)
    return weights + error * steps(data).reshape(weights.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, unpacked = np.random.default_rng(given.seed), gguf.quants.dequantize

    def dequantize(data: np.ndarray, kind: Any) -> np.ndarray:
        weights = unpacked(data, kind)
        return rounded_again(data, weights, chance) if kind == gguf.GGMLQuantizationType.Q4_1 else weights

    gguf.quants.dequantize = dequantize
    convert(str(given.source), given.out, Choices(to="attention"), tokens=0)


if __name__ == "__main__":
    main()
