"""ProbeOptions: what all probes take. A probe is a class with these options and its own, which is called to run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from gsa.console import Compute, Weights
from gsa.eval.arguments import Dtype
from gsa.options import SEED, check, choice, number

if TYPE_CHECKING:
    from gsa.eval.probes.asking import Probe
    from gsa.eval.reader import Reader


HOW = ("model", "batch_size", "weights", "compute", "device", "dtype", "threads", "output", "plot", "json")
"""Options that do not change what is asked."""


@dataclass(frozen=True)
class ProbeOptions(ABC):
    """Where results go, and how a model is asked.

    The fields are options of the command line; methods begin with an underscore, for others would be verbs there.
    """

    name: ClassVar[str]

    model: str
    """A model of ours (a name, a folder, a run), one that transformers loads, or a GGUF file."""
    lengths: str
    """Sizes of what is asked, with commas between."""
    samples: int = number(50, least=1, most=2**20)
    """Questions of each length."""
    seed: int = number(0, least=0, most=SEED)
    """Of the random choices."""
    batch_size: int = number(8, least=1)
    """Questions that are answered together."""
    weights: str = choice("auto", get_args(Weights))
    """Format of the weights in memory; for models of ours."""
    compute: str = choice("auto", get_args(Compute))
    """What prompts are computed in; for models of ours."""
    device: str = "auto"
    """Where it computes: cpu, cuda, cuda:1 for the second GPU, or auto, a GPU if torch can use one."""
    dtype: str = choice("auto", get_args(Dtype))
    """What transformers computes in; for models of others."""
    threads: int | None = None
    """Threads of torch; its own choice by default."""
    output: str | None = None
    """Folder for the result file; by default evaluations/MODEL."""
    plot: str | None = None
    """Picture to write (.png, .svg, .pdf)."""
    json: bool = False
    """Print the result as JSON."""

    def __call__(self) -> None:
        """Opens the model, asks it, and shows what comes out."""
        from gsa.eval.probes.asking import run

        check(self, f"probe {self.name}")
        run(self._maker(), self)

    @abstractmethod
    def _maker(self) -> Callable[[Reader], Probe]:
        """What makes the questions for a reader. Options are checked before there is one."""


def unusual(options: ProbeOptions) -> dict[str, Any]:
    """What is asked otherwise than by default."""
    asked = {each.name: each.default for each in fields(options) if each.name not in HOW}
    return {name: getattr(options, name) for name, usual in asked.items() if getattr(options, name) != usual}
