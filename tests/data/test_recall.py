"""MQAR as zoology defines it."""

import numpy as np
import pytest

from gsa.data.recall import IGNORED, drawn, mqar
from gsa.errors import GSAError


@pytest.mark.parametrize(("length", "pairs", "vocab_size"), [(64, 4, 8192), (512, 64, 8192), (48, 12, 26), (4, 1, 4)])
def test_examples_are_what_zoology_defines(length: int, pairs: int, vocab_size: int) -> None:
    inputs, labels = mqar(300, length=length, pairs=pairs, vocab_size=vocab_size, seed=3)
    assert inputs.shape == labels.shape == (300, length)
    assert inputs.dtype == labels.dtype == np.int64
    for row, wanted in zip(inputs, labels, strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert (keys >= 1).all()
        assert (keys < vocab_size // 2).all()
        assert (values >= vocab_size // 2).all()
        assert (values < vocab_size).all()
        assert (wanted[: 2 * pairs] == IGNORED).all()
        (asked,) = np.nonzero(wanted != IGNORED)
        assert (asked % 2 == 0).all()
        value_of = dict(zip(keys, values, strict=True))
        assert sorted(row[asked]) == sorted(keys)  # every key once
        assert [value_of[key] for key in row[asked]] == list(wanted[asked])
        others = np.delete(row[2 * pairs :], asked - 2 * pairs)
        assert (others == 0).all()


def test_keys_and_values_reach_the_ends_of_their_ranges() -> None:
    inputs, _ = mqar(500, length=16, pairs=4, vocab_size=16)
    assert set(inputs[:, 0:8:2].ravel()) == set(range(1, 8))
    assert set(inputs[:, 1:8:2].ravel()) == set(range(8, 16))


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_gaps_follow_the_power_law(power: float) -> None:
    """The gap of the first key has exactly the probabilities of the law."""
    examples, space = 40_000, 30
    inputs, _ = mqar(examples, length=64, pairs=2, vocab_size=64, power=power, seed=1)
    first = inputs[:, 0]
    places = (inputs[:, 4:] == first[:, None]).argmax(1) // 2
    expected = np.arange(1, space + 1) ** (power - 1)
    expected /= expected.sum()
    seen = np.bincount(places, minlength=space) / examples
    assert np.abs(seen - expected).max() < 5 * np.sqrt(expected.max() / examples)


def test_the_seed_decides() -> None:
    one, same, other = (mqar(20, length=64, pairs=4, seed=seed) for seed in (5, 5, 6))
    assert (one.inputs == same.inputs).all()
    assert (one.labels == same.labels).all()
    assert (one.inputs != other.inputs).any()


def test_examples_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mqar(50, length=64, pairs=4)
    monkeypatch.setattr("gsa.data.recall._BLOCK_CELLS", 1000)
    assert (mqar(50, length=64, pairs=4).inputs == whole.inputs).all()


def test_every_row_of_draws_is_equally_likely() -> None:
    rows = drawn(np.random.default_rng(0), 60_000, 2, 4)
    seen = np.bincount(rows[:, 0] * 4 + rows[:, 1], minlength=16).reshape(4, 4) / 60_000
    assert (np.diag(seen) == 0).all()
    assert np.abs(seen[~np.eye(4, dtype=bool)] - 1 / 12).max() < 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": 63}, "length must be even and at least 16 for 4 pairs"),
        ({"length": 14}, "length must be even and at least 16 for 4 pairs"),
        ({"pairs": 0}, "pairs must be at least 1"),
        ({"pairs": True}, "pairs must be a whole number, got True"),
        ({"vocab_size": 8}, "vocab_size 8 has 3 keys, expected at least 4"),
        ({"power": 0}, "power must be a number above 0"),
        ({"power": float("nan")}, "power must be a number above 0"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"examples": 2.0}, "examples must be a whole number"),
    ],
)
def test_wrong_arguments(wrong: dict, message: str) -> None:
    with pytest.raises(GSAError, match=message):
        mqar(**{"examples": 2, "length": 64, "pairs": 4, **wrong})
