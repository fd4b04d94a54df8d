"""The record of a preparation under way: with which settings it was begun, and how far it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gsa.data.documents import Encoded
from gsa.data.holdout import HELDOUT
from gsa.data.shards import TOKENIZER, Manifest, Shard, check_shard, checked
from gsa.data.sources import Input, plain_name
from gsa.data.tokenizer import Tokenizer
from gsa.data.writer import write_text
from gsa.errors import GSAError
from gsa.files import UNFINISHED, read_json

PROGRESS = "progress.json"
TIMES = "times of change"
HASHES = ("files", TIMES)
IN_MANIFEST = ("field", "shard_tokens", "exclude", "max_tokens", "holdout", "chat", *HASHES)


@dataclass(frozen=True)
class Progress:
    """How far the work is: which shards are finished, and where in the inputs the next one begins.

    The next shard begins `skip` tokens into the portion that begins at `input`, `offset`, `line`.
    """

    input: int = 0
    """Number of the input in which the portion begins."""
    offset: int = 0
    """Bytes or rows before the portion in that input."""
    line: int = 0
    """Lines or rows before the portion in that input."""
    skip: int = 0
    """Tokens of the portion that are in finished shards."""
    text_bytes: int = 0
    """Bytes of text in all portions before this one."""
    bad_rows: dict[str, int] = field(default_factory=dict)
    """Rows left out of all portions before this one, by what was wrong."""
    undecodable_bytes: int = 0
    """Bytes that were not UTF-8 in all portions before this one."""
    shards: list[Shard] = field(default_factory=list)
    """The shards that are finished."""

    def after(self, encoded: Encoded) -> Progress:
        """The same with the counts of one more portion."""
        return replace(
            self,
            text_bytes=self.text_bytes + encoded.text_bytes,
            bad_rows=dict(sorted((Counter(self.bad_rows) + Counter(encoded.bad_rows)).items())),
            undecodable_bytes=self.undecodable_bytes + encoded.undecodable_bytes,
        )


def settings_of(
    sources: Sequence[str],
    inputs: list[list[Input]],
    tokenizer: Tokenizer,
    text_field: str,
    shard_tokens: int,
    exclude: Sequence[str],
    max_tokens: int | None,
    holdout: str | None,
    chat: str | None,
) -> dict[str, Any]:
    """Everything that decides what is in the shards."""
    flat = [entry for group in inputs for entry in group]
    return {
        "sources": [
            {"name": plain_name(source), "inputs": len(group), "bytes": total_size(group)}
            for source, group in zip(sources, inputs, strict=True)
        ],
        "tokenizer": tokenizer.fingerprint,
        "field": text_field,
        "shard_tokens": shard_tokens,
        "exclude": list(exclude),
        "max_tokens": max_tokens,
        "holdout": holdout,
        "chat": chat,
        "files": _hash([[entry.name, entry.kind, entry.version or entry.size] for entry in flat]),
        TIMES: _hash([entry.changed for entry in flat]),
    }


def total_size(inputs: list[Input]) -> int | None:
    """Bytes of inputs on disk, None if one is a stream."""
    sizes = [entry.size for entry in inputs]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _hash(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def compare(out: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises if a folder was begun with other settings than these, and names those that differ."""
    differ = []
    then = {"holdout": None, "chat": None, **then}  # which earlier records lack
    for name in then:
        before, after = _short(name, then[name]), _short(name, now.get(name))
        if name in HASHES and then[name] != now.get(name):
            differ.append(f"the {name} of the sources")
        elif before != after:
            differ.append(f"{name} ({before}, now {after})")
    if differ:
        raise GSAError(
            f"data: {out} was begun with other settings; not the same are: {'; '.join(differ)}. Remove the folder, or "
            "choose another"
        )


def _short(name: str, value: Any) -> str:
    if name == "sources":  # only names: sizes that differ are found by the hash of the files
        sources = value if isinstance(value, list) else [value]
        names = (str(source.get("name") if isinstance(source, dict) else source) for source in sources)
        return ", ".join(map(plain_name, names))
    if value is None:
        return "none"
    if name == "tokenizer":  # a fingerprint, of which the beginning tells enough
        return str(value)[:12]
    return value if isinstance(value, str) else json.dumps(value)


def record(out: Path, settings: dict[str, Any], progress: Progress) -> None:
    """Writes down how far the work is."""
    write_text(out / PROGRESS, json.dumps({"settings": settings, "progress": asdict(progress)}, indent=2) + "\n")


def begun(out: Path, settings: dict[str, Any], dtype: str) -> Progress:
    """How far the work in a folder is; without a finished shard it begins anew, and that is recorded."""
    if not (out / PROGRESS).exists():
        others = [path.name for path in out.iterdir() if not path.name.endswith(UNFINISHED) and path.name != HELDOUT]
        if others:
            raise GSAError(f"data: folder {out} has other things in it ({min(others)}); choose a new one")
        record(out, settings, Progress())
        return Progress()
    values = read_json(out / PROGRESS, made_by="gsa data prepare")
    then = values.get("settings")
    if not isinstance(then, dict):
        raise GSAError(f"{out / PROGRESS}: it has no settings; remove the folder")
    progress: Progress = checked(Progress, values.get("progress"), str(out / PROGRESS))
    if not progress.shards:
        shutil.rmtree(out / TOKENIZER, ignore_errors=True)
        record(out, settings, Progress())
        return Progress()
    compare(out, then, settings)
    for shard in progress.shards:
        check_shard(out, shard, dtype)
    return progress


def manifest_of(progress: Progress, settings: dict[str, Any], tokenizer: Tokenizer) -> Manifest:
    """The manifest of what was done."""
    return Manifest(
        tokenizer=tokenizer.info,
        dtype=tokenizer.dtype,
        tokens=sum(shard.token_count for shard in progress.shards),
        documents=sum(shard.document_count for shard in progress.shards),
        text_bytes=progress.text_bytes,
        bad_rows=progress.bad_rows,
        undecodable_bytes=progress.undecodable_bytes,
        sources=settings["sources"],
        options={name: settings[name] for name in IN_MANIFEST},
        shards=progress.shards,
        tokenizer_files=tokenizer.hashes(),
    )
