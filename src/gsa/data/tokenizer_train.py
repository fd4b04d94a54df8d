"""A tokenizer of one's own: byte-level BPE, learnt from the same sources that shards are made of."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Thread

from gsa.data.documents import Findings, no_text, texts
from gsa.data.portions import read_portions
from gsa.data.report import problems
from gsa.data.sources import Input, plan
from gsa.data.tokenizer import END_OF_TEXT, JSON, config_text, pieces
from gsa.data.tokenizer_check import WORDS
from gsa.data.tokenizer_json import JsonTokenizer
from gsa.errors import GSAError
from gsa.extras import require
from gsa.files import named
from gsa.options import check_count

BYTES = 256
MAX_VOCABULARY = 2**20


def train_tokenizer(
    sources: Sequence[str],
    vocab_size: int,
    out: str | Path,
    *,
    field: str = "text",
    limit_bytes: int | None = None,
    exclude: Sequence[str] = (),
    progress: bool = True,
) -> JsonTokenizer:
    """A tokenizer of exactly `vocab_size` tokens, in a folder that `load_tokenizer` and transformers read.

    Any text comes back from its ids as it was. The same sources give the same tokenizer. `limit_bytes` ends the reading
    after so many bytes of text. With `progress`, what was wrong with rows is shown, and on a terminal how far it is.
    """
    require("tokenizers", "tokenizer: training one")
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Runner

    if vocab_size < BYTES + 1:
        raise GSAError(f"tokenizer: vocab_size must be at least {BYTES + 1} (bytes and end of text), got {vocab_size}")
    check_count("tokenizer: vocab_size", vocab_size, most=MAX_VOCABULARY)
    check_count("tokenizer: limit_bytes", limit_bytes)
    if not str(out):
        raise GSAError("tokenizer: out is empty, expected the name of a folder")
    out = named(out, "tokenizer")
    if (out / JSON).exists():
        raise GSAError(f"tokenizer: {out} has a {JSON} already; choose another folder")
    inputs = [entry for group in plan(sources, field=field, exclude=exclude, leave_out=[out]) for entry in group]
    runner = Runner(models.BPE())
    runner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    runner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress and sys.stderr.isatty(),
    )
    findings = Findings(strict=False)
    with _made(out):
        read = _read(inputs, field, limit_bytes, findings)
        first = next(read, None)
        if first is None:
            raise no_text(sources, inputs, field, findings.bad_rows)
        _interruptible(lambda: runner.train_from_iterator(chain([first], read), trainer))
        if runner.get_vocab_size() != vocab_size:
            raise GSAError(
                f"tokenizer: the text has too little variety for {vocab_size} tokens; there are "
                f"{runner.get_vocab_size()}" + "".join(f"; {line}" for line in problems(findings))
            )
        config = json.loads(config_text(eos=END_OF_TEXT))
        tokenizer = JsonTokenizer(
            str(out), runner.to_str(pretty=True) + "\n", config, int(runner.token_to_id(END_OF_TEXT) or 0)
        )
        tokenizer.save(out)
    if progress:
        for line in problems(findings):
            print(line, file=sys.stderr)
    return tokenizer


def _interruptible(work: Callable[[], None]) -> None:
    """Does the work in another thread: Ctrl-C is heard only between two lines of Python, not in a long call."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            work()
            result.set_result(None)
        except BaseException as error:  # raised again below
            result.set_exception(error)

    Thread(target=run, daemon=True).start()
    result.result()


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """A folder to write to, seen to before the long work; a new one is gone again if that fails."""
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GSAError(f"tokenizer: folder {out} cannot be made: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise GSAError(f"tokenizer: folder {out} cannot be written to")
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # other files may be in it by now
                out.rmdir()
        raise


def _read(inputs: list[Input], field: str, limit_bytes: int | None, findings: Findings) -> Iterator[str]:
    """All text in pieces; what is wrong with rows is counted."""
    read = 0
    for portion in read_portions(inputs, field):
        for document in texts(portion.parts, field, findings):
            for piece in pieces(document.text):
                yield piece
                read += len(piece.encode())
                if limit_bytes is not None and read >= limit_bytes:
                    return
