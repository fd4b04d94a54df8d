"""The servers that are measured: `gsa serve` with some models, and llama.cpp's with SmolLM2."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gsa.bench.serving.processes import Server, running

TINY, SHAPE, SMOL = "gsa-tiny", "135m", "gsa-smol"
MODELS = (TINY, SHAPE, SMOL)
"""The small model of the package; GSA in the shape of SmolLM2-135M with random weights; and SmolLM2-135M converted."""
OURS = "gsa serve"
CACHE_MB = 256
"""Of states that prompts leave: so few that it is soon full, and memory that still grows is another's."""
CONTEXT = 8192
"""Tokens that llama.cpp has room for."""


def called(about: dict[str, str]) -> str:
    """A contender in a sentence."""
    return "{server} with {name} {weights}".format(**about)


class Contender(Protocol):
    """Something that can be served."""

    @property
    def about(self) -> dict[str, str]:
        """Its `server`, and the `name` and the `weights` of the model that this serves."""

    def served(self, *, places: int, threads: int | None, folder: Path | None = None) -> AbstractContextManager[Server]:
        """It, in a process of its own, with so many places. With a folder, what it keeps is there for the next one."""

    def clients(self, server: Server) -> dict[str, Any]:
        """What `clients.ask` has to know of it."""


@dataclass(frozen=True)
class Ours:
    """A model by `gsa serve`."""

    name: str
    model: str
    """Its name or its folder."""
    weights: str

    @property
    def about(self) -> dict[str, str]:
        return {"server": OURS, "name": self.name, "weights": self.weights}

    def served(self, *, places: int, threads: int | None, folder: Path | None = None) -> AbstractContextManager[Server]:
        options = {
            "--weights": self.weights,
            "--max-concurrency": str(places),
            "--cache-mb": str(CACHE_MB),
            **({} if folder is None else {"--state-dir": str(folder)}),
            **({} if threads is None else {"--threads": str(threads)}),
        }
        arguments = [word for option in options.items() for word in option]
        return running("gsa", ["serve", self.model, *arguments], "/health")

    def clients(self, server: Server) -> dict[str, Any]:
        return {"port": server.port, "pid": server.pid, "metrics": True}


@dataclass(frozen=True)
class LlamaCpp:
    """SmolLM2-135M by llama.cpp's server, as llama-cpp-python has it: one request at a time, the others wait."""

    file: Path
    on_disk: bool = False
    """Whether it keeps states on disk, and not just that of the last request in memory."""

    @property
    def about(self) -> dict[str, str]:
        server = "llama.cpp, disk" if self.on_disk else "llama.cpp"
        return {"server": server, "name": "SmolLM2-135M", "weights": "Q4_1"}

    def served(self, *, places: int, threads: int | None, folder: Path | None = None) -> AbstractContextManager[Server]:
        from gsa.threads import usable_cores

        number = str(usable_cores() if threads is None else threads)
        options = {
            "--model": str(self.file),
            "--n_ctx": str(CONTEXT),
            "--n_threads": number,
            "--n_threads_batch": number,
            "--interrupt_requests": "false",  # or a request would end the one before it
            **({"--cache": "true", "--cache_type": "disk"} if self.on_disk else {}),
        }
        arguments = [word for option in options.items() for word in option]
        return running("llama_cpp.server", arguments, "/v1/models", folder)

    def clients(self, server: Server) -> dict[str, Any]:
        return {"port": server.port, "pid": server.pid, "count": "/extras/tokenize/count"}


def write_shape(setting: dict[str, Any]) -> dict[str, Any]:
    """Writes the model of SmolLM2's shape to a folder, with SmolLM2's tokenizer; run by `measured_alone`."""
    import shutil

    import torch

    from gsa import pretrained
    from gsa.bench.decode_model import random_model, shape
    from gsa.models.checkpoint import companions, save_model

    lm = random_model(shape(setting["quick"])).to(torch.bfloat16)
    folder = Path(setting["folder"])
    save_model(lm, folder)
    for path in companions(pretrained.folder(SMOL)):
        shutil.copy(path, folder / path.name)
    return {"parameters": lm.num_parameters}
