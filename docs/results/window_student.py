"""A student with sinks and a window, and nothing beyond them: what slots are compared with.

    python docs/results/window_student.py SOURCE OUT --window 128

SOURCE is what `gsa convert` takes. A hybrid must have a slot; the one of this student counts for e^-10000, which is 0
in every engine, so that it neither says anything nor learns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file

from gsa.convert.run import convert
from gsa.convert.students import Choices
from gsa.files import written

CLOSED = -1e4
"""Not minus infinity: weights that are trained have to be finite."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--window", type=int, required=True)
    given = parser.parse_args()
    convert(given.source, given.out, Choices(to="hybrid", window=given.window, slots=1), tokens=0)
    weights = given.out / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith(".slot_bias"):
            tensor.fill_(CLOSED)
    with written(weights) as file:
        save_file(tensors, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
