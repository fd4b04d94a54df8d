"""ModelConfig's fields: each has its sentence, and the mixers named in it are those that have the option."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise

import pytest

from gsa import ModelConfig
from gsa.mixers import MIXERS
from gsa.mixers.registry import option_names


def sentences() -> dict[str, str]:
    """The strings beneath the fields."""
    body = ast.parse(inspect.getsource(ModelConfig)).body[0].body
    return {
        field.target.id: below.value.value
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def test_every_field_has_a_sentence() -> None:
    assert list(sentences()) == list(ModelConfig.__dataclass_fields__)
    assert all(sentence.endswith(".") for sentence in sentences().values())


@pytest.mark.parametrize("option", ModelConfig.option_names())
def test_an_option_names_the_mixers_that_have_it(option: str) -> None:
    named = sentences()[option].partition(":")[0]
    names = named.removeprefix("All but ").split(", ")
    have = [name for name in MIXERS if option in option_names(name)]
    expected = [name for name in MIXERS if name not in have] if named.startswith("All but ") else have
    assert names == expected
