"""What tests of the engine share: small models, and a look into the runner's places."""

from functools import cache

import pytest
import torch

from gsa import LM
from gsa.infer import Engine, Model, Sampling
from gsa.infer.state import State
from tests.models.cases import model

SHORT = Sampling(max_tokens=8, temperature=0)


@cache
def loaded(case: str = "gsa") -> Model:
    return Model.load(model(case))


@cache
def larger() -> Model:
    """Large enough for greedy texts that do not repeat themselves."""
    return Model.load(model("gsa", hidden_size=64, num_hidden_layers=2, vocab_size=97))


def engine(**options: object) -> Engine:
    return Engine(loaded(), **options)


def teacher_forced(lm: LM, prompt: torch.Tensor, said: list[int]) -> list[int]:
    """The likeliest token in place of each that was said, by one call over the whole text."""
    with torch.no_grad():
        logits = lm(torch.cat([prompt, torch.tensor(said)])[None]).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def tensors(state: State) -> list[torch.Tensor]:
    return [state.logits, *(x for layer in state.model.layers for x in layer.values())]


def poisoned(one: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes an engine fill the places it frees with NaN; their numbers are returned as they are freed."""
    runner, freed = one._runner, []
    clear = runner.clear

    def poison(place: int) -> None:
        clear(place)
        state = runner.read(torch.tensor([1]), None)[1]
        runner.put(place, state.map(lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() else x + 99))
        freed.append(place)

    monkeypatch.setattr(runner, "clear", poison)
    return freed
