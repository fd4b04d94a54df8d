"""Everything that writes is killed again and again, and done once more: `python -m tests.killed_writers FOLDER`.

Each attempt is a process of its own that kills itself with SIGKILL at some call of the system. What hidden files it
has left must be gone when the same has been done to its end.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from gsa import pretrained
from gsa.data.prepare import prepare
from gsa.data.tokenizer_train import train_tokenizer
from gsa.infer.text_model import load
from gsa.models import LM, ModelConfig
from gsa.models import checkpoint as model_checkpoint
from gsa.models.checkpoint import save_model
from gsa.serve.store import StateStore
from gsa.train.checkpoint import clean, save_checkpoint
from gsa.train.export import export_checkpoint
from tests.train.killed import kill_at

CONFIG = ModelConfig(hidden_size=16, num_hidden_layers=1, vocab_size=4096, num_attention_heads=2, num_slots=4)
MOMENTS = [(os, "fsync", 1), (os, "fsync", 3), (os, "rename", 1), (os, "replace", 1), (os, "replace", 2)]
MOMENTS += [(model_checkpoint, "save_file", 1)]
Action = Callable[[Path], object]


def actions(material: Path) -> dict[str, Action]:
    """What writes, by name; each takes an empty folder, or what a kill has left of it."""
    lm = LM(CONFIG)
    save_checkpoint(material / "run", 1, CONFIG, {"model": lm.state_dict()}, {}, tokenizer=pretrained.folder())
    model = load("gsa-tiny")
    state, engine = model.read("It was"), model.engine
    text = material / "text.txt"
    text.write_text("A text of some words, and of some others. " * 50)

    def checkpoint(folder: Path) -> None:
        clean(folder)  # as a run does when it starts
        save_checkpoint(folder, 1, CONFIG, {"model": lm.state_dict()}, {})

    def states(folder: Path) -> None:
        with closing(StateStore(engine.model, 2**30, folder, 2**30)) as store:
            store.put(state)
            assert len(list(folder.glob("*.safetensors"))) == len(list(folder.glob("*.json"))) == len(store)

    return {
        "states": states,
        "state": lambda folder: state.save(folder / "a.state"),
        "model": lambda folder: save_model(lm, folder / "model"),
        "checkpoint": checkpoint,
        "export": lambda folder: export_checkpoint(material / "run", fresh(folder / "out"), print),
        "tokens": lambda folder: prepare([str(text)], "bytes", folder / "out", processes=1, progress=False),
        "tokenizer": lambda folder: train_tokenizer([str(text)], 260, fresh(folder / "out"), progress=False),
    }


def fresh(out: Path) -> Path:
    """A place whose last content was whole, and is removed by the user."""
    if out.exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        shutil.rmtree(out)
    return out


def hidden(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*"))


def attempt(action: Action, folder: Path, *moment: Any) -> int:
    """Does something in a process of its own, to its end or its kill; the status of that process."""
    child = os.fork()
    if child == 0:
        if moment:
            kill_at(*moment)
        action(folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # type: ignore[assignment]  # what a kill leaves needs no disk
    material = Path(sys.argv[1]) / "material"
    material.mkdir()
    for name, action in actions(material).items():
        folder, left = Path(sys.argv[1]) / name, 0
        folder.mkdir()
        for owner, call, number in MOMENTS:
            if attempt(action, folder, owner, call, number) == -signal.SIGKILL:
                left += bool(hidden(folder))
            assert attempt(action, folder) == 0, (name, call)
            assert not hidden(folder), (name, call, hidden(folder))
            shutil.rmtree(folder)
            folder.mkdir()
        assert left >= 2, f"{name}: no kill has left anything"


if __name__ == "__main__":
    main()
