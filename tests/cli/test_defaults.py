"""The command line and Python have the same defaults: those of Sampling."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from gsa.cli.chat import chat
from gsa.cli.generate import generate
from gsa.infer import Engine
from gsa.sampling import DEFAULT, Sampling


@pytest.mark.parametrize("verb", [generate, chat])
def test_defaults_are_those_of_sampling(verb: Any) -> None:
    defaults = {name: entry.default for name, entry in inspect.signature(verb).parameters.items()}
    # Which the verb has as texts, or not at all.
    others = {"stop", "logit_bias"} | ({"logprobs"} if verb is chat else set())
    for field in fields(Sampling):
        if field.name not in others:
            default = defaults[field.name]
            # None is what the model's makers advise, and this where they do not.
            assert default == getattr(DEFAULT, field.name) or (verb is chat and default is None), field.name


def test_the_engine_has_them_too() -> None:
    for function in (Engine.generate, Engine.stream, Engine.submit):
        assert inspect.signature(function).parameters["sampling"].default == DEFAULT == Sampling()
    assert (DEFAULT.temperature, DEFAULT.top_p, DEFAULT.seed) == (0.8, 0.95, None)
