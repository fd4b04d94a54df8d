"""Multi-query associative recall (MQAR): a synthetic task of looking up what was read, as zoology defines it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gsa.errors import GSAError
from gsa.options import SEED, check_count

IGNORED = -100
"""The label of a place where nothing is asked."""
FILLER = 0
"""The token between questions."""
MOST_EXAMPLES = 2**31 - 1
_BLOCK_CELLS = 1 << 22
"""Numbers that are worked on at once, so that memory does not grow with the number of examples."""


class Recall(NamedTuple):
    """Examples of one length. Both arrays are int64 [examples, length]; a label stands where its key is asked."""

    inputs: NDArray[np.int64]
    labels: NDArray[np.int64]


def mqar(
    examples: int, *, length: int, pairs: int, vocab_size: int = 8192, power: float = 0.01, seed: int = 0
) -> Recall:
    """Examples of MQAR: keys with their values, then every key once more, where its value is the label.

        inputs   k1 v1 k2 v2 | k2  0  0  0 k1  0
        labels    -  -  -  - | v2  -  -  - v1  -      (`-` is -100, which the loss ignores)

    Keys are drawn from 1 .. vocab_size/2 - 1 and values from vocab_size/2 .. vocab_size - 1, each without replacement.
    Behind the pairs a key is asked at every place 2 pairs + 2 gap; the gaps are drawn without replacement from
    0 .. (length - 2 pairs)/2 - 1 with probabilities in proportion to (gap + 1)^(power - 1). The same arguments give the
    same examples.

    Args:
        examples: How many.
        length: Tokens of each, an even number of at least 4 for every pair.
        pairs: Keys of each.
        vocab_size: Tokens that there are.
        power: Of the law of gaps: the smaller, the sooner keys are asked; 1 asks anywhere with equal probability.
        seed: Of the random choices.

    >>> task = mqar(2, length=8, pairs=2, vocab_size=16)
    >>> task.inputs.shape, (task.labels != IGNORED).sum(1).tolist()
    ((2, 8), [2, 2])
    """
    _check(examples, length, pairs, vocab_size, power, seed)
    rng = np.random.default_rng(seed)
    half, space = vocab_size // 2, (length - 2 * pairs) // 2
    keys = 1 + drawn(rng, examples, pairs, half - 1)
    values = half + drawn(rng, examples, pairs, vocab_size - half)
    places = 2 * pairs + 2 * _gaps(rng, examples, pairs, space, power)
    inputs = np.full((examples, length), FILLER, np.int64)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(inputs, places, keys, axis=1)
    labels = np.full((examples, length), IGNORED, np.int64)
    np.put_along_axis(labels, places, values, axis=1)
    return Recall(inputs, labels)


def drawn(rng: np.random.Generator, rows: int, count: int, choices: int) -> NDArray[np.int64]:
    """Numbers below `choices` [rows, count], no number twice in a row, every row equally likely.

    The first steps of a Fisher-Yates shuffle, taken by many rows at once.
    """
    steps = np.arange(count)
    swaps = rng.integers(steps, choices, size=(rows, count))
    found = np.empty((rows, count), np.int64)
    block = max(1, _BLOCK_CELLS // choices)
    for begin in range(0, rows, block):
        with_whom = swaps[begin : begin + block]
        here = np.arange(len(with_whom))
        deck = np.tile(np.arange(choices, dtype=np.int32), (len(with_whom), 1))
        for step in steps:
            other = with_whom[:, step]
            found[begin : begin + block, step] = deck[here, other]
            deck[here, other] = deck[:, step]
    return found


def _gaps(rng: np.random.Generator, rows: int, count: int, space: int, power: float) -> NDArray[Any]:
    """Gaps [rows, count], drawn one after another without replacement with probabilities ~ (gap + 1)^(power - 1).

    A race: gap g arrives after a time that is exponential with rate p(g), and the order of arrival is that of drawing.
    """
    rates = np.arange(1, space + 1) ** (power - 1.0)
    found = np.empty((rows, count), np.int64)
    block = max(1, _BLOCK_CELLS // space)
    for begin in range(0, rows, block):
        arrivals = rng.standard_exponential((min(block, rows - begin), space)) / rates
        found[begin : begin + block] = np.argsort(arrivals, axis=1)[:, :count]
    return found


def _check(examples: int, length: int, pairs: int, vocab_size: int, power: float, seed: int) -> None:
    counts = {"examples": examples, "length": length, "pairs": pairs, "vocab_size": vocab_size}
    for name, value in counts.items():
        if type(value) is not int:
            raise GSAError(f"mqar: {name} must be a whole number, got {value!r}")
        check_count(f"mqar: {name}", value, most=MOST_EXAMPLES)
    if type(seed) is not int or not 0 <= seed <= SEED:
        raise GSAError(f"mqar: seed must be a whole number from 0 to 2^64 - 1, got {seed!r}")
    if type(power) not in (int, float) or not 0 < power <= 1:
        raise GSAError(f"mqar: power must be a number above 0 and at most 1, got {power!r}")
    if length % 2 or length < 4 * pairs:
        raise GSAError(
            f"mqar: length must be even and at least {4 * pairs} for {pairs} pairs (of each, 2 tokens to read and 2 to "
            f"ask), got {length}"
        )
    if pairs > vocab_size // 2 - 1:
        raise GSAError(
            f"mqar: vocab_size {vocab_size} has {max(vocab_size // 2 - 1, 0)} keys, expected at least {pairs}"
        )
