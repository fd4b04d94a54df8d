"""A tokenizer whose tokens are bytes, so that lengths can be counted by hand."""

from collections.abc import Sequence

from gsa.eval.reader import ReaderTokenizer


class ByteTokenizer(ReaderTokenizer):
    eos_id, bos_id, vocab_size = 0, None, 256

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")
