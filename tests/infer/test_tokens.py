"""TokenHash: it depends on the tokens and their order alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.infer.tokens import TokenHash

IDS = st.lists(st.integers(0, 2**63 - 1), max_size=20)


def digest(ids: object) -> bytes:
    return TokenHash.advance(TokenHash.EMPTY, ids)


def test_the_hash_is_a_chain_of_sha256_over_words_of_eight_bytes() -> None:
    first = hashlib.sha256(bytes(32) + b"\x05\x01\0\0\0\0\0\0").digest()
    second = hashlib.sha256(first + b"\x07\0\0\0\0\0\0\0").digest()
    assert digest([261]) == first
    assert digest([261, 7]) == second


@given(ids=IDS, at=st.integers(0, 20))
def test_where_a_sequence_is_cut_changes_nothing(ids: list[int], at: int) -> None:
    assert TokenHash.advance(digest(ids[:at]), ids[at:]) == digest(ids)


@given(one=IDS, other=IDS)
def test_sequences_that_differ_have_hashes_that_differ(one: list[int], other: list[int]) -> None:
    assert (digest(one) == digest(other)) == (one == other)


def test_the_order_of_tokens_counts() -> None:
    assert digest([1, 2]) != digest([2, 1])


@given(ids=st.lists(st.integers(0, 100), max_size=9))
def test_lists_tuples_arrays_and_tensors_of_any_width_are_one(ids: list[int]) -> None:
    kinds = [
        tuple(ids),
        np.array(ids, dtype=np.uint16),
        np.array(ids, dtype=">i4"),
        np.repeat(np.array(ids, dtype=np.int64), 2)[::2],
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(ids, dtype=torch.int32),
    ]
    assert {digest(kind) for kind in kinds} == {digest(ids)}


def test_no_tokens_have_the_empty_hash() -> None:
    assert digest([]) == digest(torch.empty(0)) == TokenHash.EMPTY


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([3, -1], "not be negative, got -1"),
        ([1.5], r"whole numbers \[T\], got float64 \[1\]"),
        ([True], r"got bool \[1\]"),
        ([2**64], r"got object \[1\]"),
        ([[1, 2]], r"got int64 \[1, 2\]"),
        (torch.tensor(3), r"got int64 \[\]"),
        ([[1], [2, 3]], "got list"),
        ("text", "got <U4"),
    ],
)
def test_what_is_not_a_sequence_of_tokens_is_refused(ids: object, reason: str) -> None:
    with pytest.raises(GSAError, match=f"TokenHash: ids must .*{reason}"):
        digest(ids)
