"""TokenHash: the running hash of a token sequence, the same however the sequence was cut."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from gsa.errors import GSAError


class TokenHash:
    """A chain: with each token, a digest becomes the SHA-256 of itself and of the token's id as 8 bytes, lowest first.

    >>> whole = TokenHash.advance(TokenHash.EMPTY, [5, 6, 7])
    >>> TokenHash.advance(TokenHash.advance(TokenHash.EMPTY, [5]), [6, 7]) == whole
    True
    """

    EMPTY: ClassVar[bytes] = bytes(32)
    """The digest of no tokens."""

    @staticmethod
    def advance(digest: bytes, ids: Sequence[int] | Tensor | np.ndarray[Any, Any]) -> bytes:
        """The digest of a sequence [T] that has `digest` and goes on with these ids."""
        words = _words(ids)
        for start in range(0, len(words), 8):
            digest = sha256(digest + words[start : start + 8]).digest()
        return digest

    @staticmethod
    def each(digest: bytes, ids: Sequence[int] | Tensor | np.ndarray[Any, Any]) -> bytes:
        """The digests after each of these ids, 32 bytes long, end to end."""
        words, digests = _words(ids), bytearray()
        for start in range(0, len(words), 8):
            digest = sha256(digest + words[start : start + 8]).digest()
            digests += digest
        return bytes(digests)


def _words(ids: Sequence[int] | Tensor | np.ndarray[Any, Any]) -> bytes:
    """The ids as 8 bytes each, end to end."""
    try:
        numbers = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
    except (TypeError, ValueError, OverflowError):
        raise GSAError(f"TokenHash: ids must be whole numbers [T], got {type(ids).__name__}") from None
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise GSAError(f"TokenHash: ids must be whole numbers [T], got {numbers.dtype} {list(numbers.shape)}")
    if len(numbers) and int(numbers.min()) < 0:
        raise GSAError(f"TokenHash: ids must not be negative, got {int(numbers.min())}")
    return numbers.astype("<u8").tobytes()
