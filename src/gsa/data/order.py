"""A shuffled order that needs no memory: the place of each sample is computed, not stored.

A permutation of n numbers is a small Feistel network over the next power of four, walked until it lands below n. So the
order of 50 million samples costs nothing to begin, to enter in the middle, or to share between processes.
"""

from __future__ import annotations

from gsa.errors import GSAError

ROUNDS = 6
WORD = 2**64 - 1


def _mixed(x: int) -> int:
    """A hash of 64 bits (the finaliser of splitmix64)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


class Shuffle:
    """The samples 0..count-1, epoch after epoch without end, each epoch in an order of its own.

    >>> shuffle = Shuffle(5, seed=0)
    >>> first, second = ([shuffle[position] for position in epoch] for epoch in (range(5), range(5, 10)))
    >>> sorted(first) == sorted(second) == [0, 1, 2, 3, 4], first == second
    (True, False)
    """

    def __init__(self, count: int, seed: int):
        if count < 1:
            raise GSAError(f"shuffle: there must be at least one sample, got {count}")
        self.count, self.seed = count, seed
        self._bits = ((count - 1).bit_length() + 1) // 2  # of each half of a number

    def __getitem__(self, position: int) -> int:
        """The sample at a position."""
        epoch, place = divmod(position, self.count)
        key = _mixed(_mixed(self.seed & WORD) + epoch + 1 & WORD)
        while True:  # the network permutes up to four times as many numbers: a few turns on average
            place = self._permuted(place, key)
            if place < self.count:
                return place

    def _permuted(self, x: int, key: int) -> int:
        mask = (1 << self._bits) - 1
        left, right = x >> self._bits, x & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mixed(key + (turn << 40) + right & WORD) & mask)
        return left << self._bits | right
