"""The command line and Python have the same defaults: those of Sampling."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from gsa.cli.chat import chat
from gsa.cli.generate import generate
from gsa.infer import Engine
from gsa.infer.text import ADVISED
from gsa.sampling import DEFAULT, Sampling


@pytest.mark.parametrize("verb", [generate, chat])
def test_defaults_are_those_of_sampling(verb: Any) -> None:
    defaults = {name: entry.default for name, entry in inspect.signature(verb).parameters.items()}
    others = {"stop", "logit_bias"}  # which the verb has as texts, or not at all
    if verb is chat:
        others |= {"logprobs", *ADVISED}  # what is not given is as a model advises it, and else as here
        assert {defaults[name] for name in ADVISED} == {None}
    for field in fields(Sampling):
        if field.name not in others:
            assert defaults[field.name] == getattr(DEFAULT, field.name), field.name


def test_the_engine_has_them_too() -> None:
    for function in (Engine.generate, Engine.stream, Engine.submit):
        assert inspect.signature(function).parameters["sampling"].default == DEFAULT == Sampling()
    assert (DEFAULT.temperature, DEFAULT.top_p, DEFAULT.seed) == (0.8, 0.95, None)
