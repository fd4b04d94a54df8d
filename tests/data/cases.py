"""Documents and files to prepare."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

from gsa.data.shards import Tokens
from gsa.data.tokenizer import load_tokenizer

SYLLABLES = "the|of|a|wha|le|sea|é|naï|ve|东西|😀|n't|18|51|ing|er|Ahab"
BETWEEN = [" ", " ", " ", ", ", ".\n", "\n\n", " \t", "  "]


def text(length: int, seed: int = 0) -> str:
    """So many characters of varied text, or a few more."""
    choose = random.Random(seed)
    parts, size = [], 0
    while size < length:
        parts.append("".join(choose.choices(SYLLABLES.split("|"), k=choose.randint(1, 3))) + choose.choice(BETWEEN))
        size += len(parts[-1])
    return "".join(parts)


def documents(count: int, length: int = 200) -> list[str]:
    return [text(length, seed) for seed in range(count)]


def jsonl(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": entry, "id": i}).encode() + b"\n" for i, entry in enumerate(texts))


def parquet(path: Path, texts: Sequence[str | None], group: int = 7) -> None:
    table = pyarrow.table({"id": list(range(len(texts))), "text": pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=group)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read_documents(folder: Path) -> list[str]:
    """The documents in a prepared folder, from its tokens and its index alone."""
    tokens = Tokens.open(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    assert tokenizer.fingerprint == tokens.tokenizer.fingerprint
    starts = [*tokens.document_starts(0, tokens.length).tolist(), tokens.length]
    assert starts[0] == 0
    found = []
    for begin, end in pairwise(starts):
        ids = tokens.read(begin, end)
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.eos_id not in ids[:-1]
        found.append(tokenizer.decode(ids[:-1]))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
