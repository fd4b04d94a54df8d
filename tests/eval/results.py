"""Result files as `gsa eval` writes them, for tests of what reads them."""

from pathlib import Path
from typing import Any

import numpy as np

from gsa.eval.results import FORMAT, save_result


def result(name: str, task: str, scores: Any, **more: Any) -> dict[str, Any]:
    """A result of a model on a task with these right and wrong answers (or other scores) of documents 0, 1, ..."""
    scores = [float(score) for score in scores]
    error = float(np.std(scores, ddof=1) / len(scores) ** 0.5) if len(scores) > 1 else None
    return {
        "format": FORMAT,
        "model": {"name": name, "kind": "gsa"},
        "task": task,
        "title": task.upper(),
        "group": None,
        "version": 1,
        "shots": 0,
        "limit": None,
        "data": f"{task}.jsonl",
        "metrics": {"acc": {"value": float(np.mean(scores)), "stderr": error, "higher_is_better": True}},
        "main": "acc",
        "samples": {"id": list(range(len(scores))), "acc": scores},
        "settings": {"batch_size": 8},
        "seconds": 1.0,
        "gsa": "0",
        "packages": {},
        **more,
    }


def text_result(name: str, nats: Any, sizes: Any, **more: Any) -> dict[str, Any]:
    """A result on a text: bits per byte of documents with these losses in nats and numbers of bytes."""
    nats, sizes = np.array(nats, dtype=float), np.array(sizes)
    bits = float(nats.sum() / sizes.sum() / np.log(2))
    return (
        result(
            name,
            "text",
            [0.0],
            metrics={"bits_per_byte": {"value": bits, "stderr": None, "higher_is_better": False}},
            main="bits_per_byte",
            samples={"id": [f"doc {i}" for i in range(len(nats))], "nats": nats.tolist(), "bytes": sizes.tolist()},
        )
        | more
    )


def saved(folder: Path, *results: dict[str, Any]) -> Path:
    """A folder with these results."""
    for number, each in enumerate(results):
        save_result(each, folder / f"{each['task']}-{number}.json")
    return folder
