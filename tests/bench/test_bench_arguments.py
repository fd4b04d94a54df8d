"""Lists that are given to benchmarks."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.bench.arguments import MOST, listed, listed_numbers
from gsa.bench.decode import decode
from gsa.errors import GSAError

from ..examples import examples
from .test_bench_decode import needs_native

KNOWN = ("gsa", "gla", "mamba")
WORDS = {"all": KNOWN, "none": ()}


def test_names() -> None:
    assert listed("mixers", "gla, gsa ,gla", KNOWN) == ["gla", "gsa"]
    for text, expected in (
        ("all", [*KNOWN]),
        ("none", []),
        ("mamba,all", ["mamba", "gsa", "gla"]),
        ("none,gla", ["gla"]),
    ):
        assert listed("mixers", text, KNOWN, WORDS) == expected, text
    for text in ("", "gsa,", "GSA", "gsa gla", "all"):
        with pytest.raises(GSAError, match=r"bench: mixers: .* is not known.*; expected gsa, gla, mamba, or several"):
            listed("mixers", text, KNOWN)
    with pytest.raises(GSAError) as raised:
        listed("mixers", "gla,mamb", KNOWN, WORDS)
    assert str(raised.value) == (
        "bench: mixers: 'mamb' is not known (did you mean 'mamba'?); expected all, none, gsa, gla, mamba, or several "
        "with commas between, got 'gla,mamb'"
    )


def test_numbers() -> None:
    assert listed_numbers("lengths", " 8192,2048 , 8192", least=2) == [8192, 2048]
    assert listed_numbers("lengths", f"2,{MOST}", least=2) == [2, MOST]
    for text in ("", "2,", "1", "-2", "2.0", "2048,1", "short", "\N{SUPERSCRIPT TWO}", str(MOST + 1), "9" * 5000):
        with pytest.raises(GSAError, match=r"bench: lengths must be whole numbers from 2 to 2147483647, .*, got '"):
            listed_numbers("lengths", text, least=2)


@examples(50)
@given(st.text() | st.lists(st.sampled_from((*KNOWN, *WORDS, "7", "")), max_size=4).map(",".join))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    with suppress(GSAError):
        assert set(listed("mixers", text, KNOWN, WORDS)) <= set(KNOWN)
    with suppress(GSAError):
        assert min(listed_numbers("lengths", text, least=2)) >= 2


@needs_native
def test_the_mixers_of_decoding() -> None:
    with pytest.raises(
        GSAError, match=r"bench: mixers: 'mamb' is not known \(did you mean 'mamba'\?\); expected all, none"
    ):
        decode(mixers="gla,mamb")
