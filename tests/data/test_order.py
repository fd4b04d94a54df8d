"""A shuffle is a permutation of each epoch, a new one each time, and needs no memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.data.order import Shuffle
from gsa.errors import GSAError


@given(count=st.integers(1, 300), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_every_epoch_has_every_sample_once(count: int, seed: int, epoch: int) -> None:
    shuffle = Shuffle(count, seed)
    assert sorted(shuffle[epoch * count + i] for i in range(count)) == list(range(count))


def test_epochs_and_seeds_differ_and_nothing_stays_in_order() -> None:
    orders = [
        np.array([Shuffle(1000, seed)[epoch * 1000 + i] for i in range(1000)])
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    in_order = np.arange(1000)
    for i, order in enumerate(orders):
        for other in (*orders[:i], in_order):
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.1
        assert (np.diff(order) == 1).sum() < 10


def test_orders_of_four_are_about_equally_frequent() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = tuple(Shuffle(4, seed)[i] for i in range(4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert min(counts.values()) > 130
    assert max(counts.values()) < 280  # of 200 expected


def test_a_shuffle_of_billions_starts_at_once() -> None:
    assert len({Shuffle(10**12, 0)[position] for position in range(10**9, 10**9 + 100)}) == 100


def test_an_empty_shuffle_is_refused() -> None:
    with pytest.raises(GSAError, match="at least one sample, got 0"):
        Shuffle(0, 0)
